"""What `partita serve` refuses before it opens anything; tests/serve has the page itself."""

import importlib.util
import socket

import pytest

pytest.importorskip("starlette")


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_a_missing_package_is_named_with_how_to_get_it(run, monkeypatch, package):
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else known(name)
    )
    result = run("serve")
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: the live page needs the package {package}, which is not installed; "
        "install it with: pip install 'partita[serve]'\n"
    )


def test_an_address_that_others_can_reach_is_refused(run):
    result = run("serve", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "'0.0.0.0' can be reached from other machines; use 127.0.0.1" in result.stderr


def test_a_second_page_on_a_port_is_refused_in_a_sentence(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: --port: port {port} is taken; choose another with --port, or leave it out for a "
        "free one\n"
    )
