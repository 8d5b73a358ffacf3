#!/usr/bin/env bash
# Sets up .venv and runs the test suite; arguments go to pytest, for example: ./scripts/test.sh -k cli
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

cd "$root"
say "pytest $*"
exec "$python" -m pytest "$@"
