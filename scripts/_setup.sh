# Sourced by run.sh and test.sh: makes .venv in the checkout and installs everything into it once.
# Sets `root` and `python`, the interpreter of that environment. CK_PATCH_PYTHON picks its base.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
python=$venv/bin/python

say() { printf '== %s\n' "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    if [[ -n ${CK_PATCH_PYTHON:-} ]]; then
        usable_python "$CK_PATCH_PYTHON" && command -v "$CK_PATCH_PYTHON"
        return
    fi
    # 3.11 first: every release of torch and comfy-kitchen named here has a wheel for it.
    for candidate in python3.11 python3.12 python3.13 python3.10 python3 python; do
        if usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

has_gpu() { nvidia-smi >/dev/null 2>&1; }

# What the environment depends on, and whether ck_patch is still in it: a change of any of it
# installs anew.
fingerprint() {
    cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" | cksum
    printf '%s\n' "$root" "$torch" "$("$python" --version)" "$(installed ck-patch)"
}

base_of() { "$1" -c 'import os, sys; print(os.path.realpath(sys.base_prefix), sys.version)' 2>/dev/null; }

make_environment() {
    local base
    if [[ -n ${CK_PATCH_PYTHON:-} ]]; then
        base=$(find_python) || die "CK_PATCH_PYTHON=$CK_PATCH_PYTHON is no Python 3.10 to 3.13 with the venv module"
        # Another Python than the one that .venv was made from: make it anew.
        [[ $(base_of "$python") != "$(base_of "$base")" ]] || return 0
    elif "$python" -c '' >/dev/null 2>&1; then
        return
    fi
    base=$(find_python) ||
        die "no Python 3.10 to 3.13 with the venv module was found (Debian: apt install python3-venv)"
    say "making $venv with $base ($("$base" --version))"
    rm -rf "$venv"
    "$base" -m venv "$venv"
}

pip_install() { "$python" -m pip install --disable-pip-version-check --no-input "$@"; }

# NAME==VERSION of each of the named distributions that is installed.
installed() {
    "$python" - "$@" <<'EOF'
import importlib.metadata
import sys

for name in sys.argv[1:]:
    for distribution in importlib.metadata.distributions(name=name):
        print(f"{name}=={distribution.version}")
EOF
}

install_all() {
    rm -f "$stamp"
    if [[ -z $(installed torch) ]]; then
        say "installing $torch"
        pip_install "$torch"
    fi
    # Nothing installed later may move torch or the Triton that torch brought.
    installed torch triton >"$venv/constraints.txt"
    say "installing ck_patch, comfy-kitchen 0.2.40 and the tools; keeping $(tr '\n' ' ' <"$venv/constraints.txt")"
    pip_install -c "$venv/constraints.txt" -e "$root[cli,test]" comfy-kitchen==0.2.40
    fingerprint >"$stamp"
}

if has_gpu; then
    torch=torch
else
    # Where there is no NVIDIA GPU any build will do; this one is known to work.
    torch='torch==2.13.0'
fi
stamp=$venv/ck_patch-setup
make_environment
if [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]; then
    say "$venv is up to date"
else
    install_all
fi
