"""GPT-2 and T5 of two layers, as configurations: what hangs on no depth is asked of these.

They are as wide as the real ones and take a fraction of the time; `f"{GPT2}@64"` has 64 tokens.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "data" / "shallow"
GPT2 = f"{_FOLDER / 'gpt2-two-layers.json'}"
T5 = f"{_FOLDER / 't5-two-layers.json'}"
