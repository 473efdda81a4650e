# Sourced by the scripts beside it: the environment they share, in .venv of the repository or where
# PARTITA_VENV says.
#
#   ensure_environment base|docs|test|dev    make it if it is missing, install what the level needs
#
# A stamp in it remembers what was installed from which files. While nothing changed, pip is not
# called at all, so that a second run needs no network. A level holds the ones before it; docs stands
# by itself.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${PARTITA_VENV:-"$root/.venv"}
case $venv in /*) ;; *) venv="$PWD/$venv" ;; esac
shown=${venv#"$root/"}
python="$venv/bin/python"

fail() {
    echo "error: $*" >&2
    exit 2
}

# The first Python that the pinned packages are built for and that can make environments. Each
# candidate is run, since a name on the PATH may be an empty shell (pyenv) or lack a module (Debian
# without python3-venv).
find_python() {
    local candidate version without_venv=""
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
        version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
            2>/dev/null) || continue
        "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' ||
            continue
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        without_venv=$version
    done
    if [ -n "$without_venv" ]; then
        fail "Python $without_venv is here without the module venv;" \
            "install it (Debian, Ubuntu: apt install python$without_venv-venv) and run this again"
    fi
    fail "no Python from 3.11 to 3.14 was found; install Python 3.13 and run this again"
}

make_venv() {
    local creator
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
        fail "$venv is there and no Python environment; remove it or set PARTITA_VENV to another folder"
    fi
    creator=$(find_python) || exit
    echo "making $shown with $("$creator" --version)"
    "$creator" -m venv --clear "$venv" || fail "cannot make $venv; see the lines above"
}

# One line that changes whenever the environment must: the interpreter, the place, the two files.
fingerprint() {
    "$python" - "$root" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [sys.version, sys.prefix, str(root)]
parts += [(root / name).read_text() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

# Is this level, or one that holds it, installed from the files as they are now?
is_installed() {
    local level wanted=$2
    for level in $1; do
        [ "$(cat "$venv/.partita-$level" 2>/dev/null)" = "$wanted" ] && return 0
    done
    return 1
}

ensure_environment() {
    local level=$1 target enough wanted
    case $level in
        base) target="."       enough="base docs test dev" ;;
        docs) target=".[docs]" enough="docs" ;;
        test) target=".[test]" enough="test dev" ;;
        dev)  target=".[dev]"  enough="dev" ;;
        *) fail "unknown level $level" ;;
    esac
    "$python" -c 'import pip' >/dev/null 2>&1 || make_venv
    wanted=$(fingerprint)
    if is_installed "$enough" "$wanted"; then
        return
    fi
    echo "installing partita ($level) into $shown; the first time takes minutes"
    local pip=("$python" -m pip install --quiet --disable-pip-version-check
        --constraint "$root/constraints.txt")
    # The builder first and no build isolation, so that it is pinned as everything else is.
    (cd "$root" && "${pip[@]}" hatchling editables &&
        "${pip[@]}" --no-build-isolation --editable "$target") ||
        fail "installing failed, see the lines above; without network, connect once and run again"
    echo "$wanted" >"$venv/.partita-$level"
}
