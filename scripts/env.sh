# Sourced by the scripts of this folder: enters the repository root and makes PYTHON, the interpreter of .venv with
# trtopt and everything its tests need, or with NEEDS=quickstart only what the quickstart does. Installs again only when
# pyproject.toml, constraints.txt, this file or Python changed.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    echo "$(basename "$0"): $1" >&2
    exit 1
}

case "$(uname -s)/$(uname -m)" in
Linux/x86_64) PYTHON=.venv/bin/python ;;
MINGW*/x86_64 | MSYS*/x86_64 | CYGWIN*/x86_64) PYTHON=.venv/Scripts/python.exe ;;
*) stop "TensorRT for RTX comes for x86-64 Linux and Windows only, and this machine is $(uname -s) on $(uname -m)" ;;
esac

if [ ! -x "$PYTHON" ]; then
    base=$(command -v python3 || command -v python || true)
    [ -n "$base" ] || stop "Python is not installed; install Python 3.10 or later"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        stop "trtopt needs Python 3.10 or later, and $base is $("$base" --version 2>&1)"
    "$base" -m venv .venv || stop "cannot make .venv; on Debian and Ubuntu: apt install python3-venv"
fi

stamp=$(cat pyproject.toml constraints.txt scripts/env.sh .venv/pyvenv.cfg | sha256sum)
is_installed() { [ "$(cat ".venv/$1" 2>/dev/null)" = "$stamp" ]; }
if [ "${NEEDS:-tests}" = quickstart ]; then
    marker=installed-quickstart
    packages=(--editable ".[rtx,cpu,torch]" scikit-learn)
    takes="about 1500 MB on the disk, about 1 min where downloads are fast"
else
    marker=installed
    packages=(--editable ".[rtx,cpu,torch,report,sign,ray,sweep,polygraphy,dev]")
    takes="about 2100 MB on the disk in all, about 2 min where downloads are fast"
fi
if ! is_installed installed && ! is_installed "$marker"; then
    echo "installing into .venv ($takes) ..." >&2
    install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$@"; }
    if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
        # The build without CUDA where pip's sources have it: plain torch on Linux brings gigabytes of CUDA.
        version=$(sed -n 's/^torch==//p' constraints.txt)
        if ! install "torch==$version+cpu" 2>/dev/null; then
            echo "pip finds no CPU build of torch $version: installing the default one, which may bring CUDA (gigabytes);" >&2
            echo "to avoid that, install a CPU build into .venv first, as pytorch.org/get-started says" >&2
            install "torch==$version" || stop "cannot install torch $version"
        fi
    fi
    install "${packages[@]}" || stop "the installation failed"
    echo "$stamp" >".venv/$marker"
fi
