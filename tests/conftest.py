"""All runs of the tests try the same examples, on a continuous-integration machine or not.

A referee that tries everything takes minutes on a rare example; which ones are met should not be a
matter of luck.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "same",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")
