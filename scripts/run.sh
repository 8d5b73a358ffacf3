#!/usr/bin/env bash
# Sets up .venv and runs the demo; arguments go to it, for example: ./scripts/run.sh --json out.json
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

say "python -m ck_patch demo $*"
exec "$python" -m ck_patch demo "$@"
