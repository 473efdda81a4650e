import pytest

from partita.cluster import resolve
from partita.errors import InputError


def test_a_machine_with_other_memory_and_links_is_the_same_in_all_else():
    usual, other = resolve("2x2xA100"), resolve("2x2xA100@memory=24GB,links=0.5")
    assert {kind.memory_bytes for kind in other.kinds} == {24_000_000_000}
    links = zip(usual.links, other.links, strict=True)
    assert {after.bytes_per_s / before.bytes_per_s for before, after in links} == {0.5}
    assert other.devices == usual.devices
    assert other.name.endswith("@memory=24GB,links=0.5")
    assert other.fingerprint() != usual.fingerprint()


def test_a_file_may_be_changed_too(tmp_path):
    file = tmp_path / "lab.toml"
    file.write_text('[[nodes]]\ndevices = "2xA100"\n')
    assert resolve(f"{file}@memory=1GiB").kinds[0].memory_bytes == 2**30


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4xA100@memory=lots", "memory: found 'lots'; write a size such as 40GB or 16GiB"),
        ("4xA100@links=0", "links: found '0'; give a factor of 0.001 to 1000: links=0.5"),
        ("4xA100@links=nan", "links: found 'nan'; give a factor"),
        ("4xA100@link=1", "cluster: found 'link'; did you mean links"),
        ("4xNO@links=1", "unknown device or machine 'NO'"),
    ],
)
def test_a_change_that_cannot_be_is_refused(spec, message):
    with pytest.raises(InputError) as error:
        resolve(spec)
    assert message in str(error.value)
