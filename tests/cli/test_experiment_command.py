"""partita experiment, as a user would call it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "placement"


def test_the_tiny_example_gives_a_folder_to_look_at(run, run_json, tmp_path):
    out = tmp_path / "tiny"
    first = run(
        "experiment", str(EXAMPLES / "tiny.toml"), "-o", str(out), "--quiet", "--workers", "1"
    )
    assert first.exit_code == 0, first.output
    assert "map-elites" in first.stdout
    assert f"look at it: {out / 'index.html'}" in first.stdout
    for name in ("index.html", "animation.html", "table.csv", "table.json", "table.md"):
        assert (out / name).stat().st_size > 100
    again = run_json("experiment", str(EXAMPLES / "tiny.toml"), "-o", str(out), "--quiet")
    assert again["resumed"] == again["runs"] == 4


def test_a_wrong_name_is_answered_with_the_nearest(run, tmp_path):
    path = tmp_path / "e.toml"
    text = (EXAMPLES / "tiny.toml").read_text()
    path.write_text(text.replace("annealing", "anealing", 2))
    result = run("experiment", str(path), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "did you mean annealing?" in result.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(tmp_path):
    path, out = tmp_path / "long.toml", tmp_path / "out"
    path.write_text(
        'name = "long"\nsemantics = "exprimo"\nseeds = 200\ntime_limit_s = 0.4\n'
        '[[networks]]\nmodel = "resnet50"\n[[clusters]]\ncluster = "malvik"\n'
        '[[optimisers]]\nmethod = "annealing"\nparameters = { rounds = 100000 }\n'
    )
    words = [sys.executable, "-m", "partita", "experiment", str(path), "-o", str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        deadline = time.monotonic() + 60
        while len(list(out.glob("runs/*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        stdout, _ = job.communicate(timeout=60)
    assert job.returncode == 130
    assert "runs are missing; the same command goes on" in stdout
    assert len(list(out.glob("runs/*.json"))) >= 2
    assert not list(out.glob("runs/.*"))  # nothing half written
    assert (out / "index.html").is_file()
