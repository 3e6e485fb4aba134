#!/usr/bin/env bash
# Builds everything with Bazel, then tests. The arguments go to `bazel test`:
#
#   bash tools/bazel_test.sh                                # every test
#   bash tools/bazel_test.sh //tests:unit/core/groups_test  # one
#   bash tools/bazel_test.sh --test_tag_filters=slow        # as .ci/run does
#
# BAZEL chooses the program; otherwise it is the one on PATH, if that is Bazel 2.1
# to 6, or else Debian's (as root) or npm's, which this script installs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

npm_bazel=.bazel/node_modules/@bazel/bazel-linux_x64/bazel-2.1.0-linux-x86_64

# Succeeds if $1 is a Bazel that has the Python rules built in. Debian's build
# does not know that it is 4.2.3.
is_suitable() {
  "$1" --version 2>/dev/null | grep -qE '^bazel (2\.[1-9]|[3-6]\.|no_version)'
}

install_with_apt() {
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y
    --no-install-recommends bazel-bootstrap)
  # Without an update the lists may be absent or name files that are gone.
  { "${install[@]}" || { apt-get update -qq && "${install[@]}"; } } &>/dev/null
}

# Not the package @bazel/bazel: its program exits with 0 without running anything.
install_with_npm() {
  npm install --silent --no-save --no-package-lock --no-audit --no-fund \
    --prefix .bazel @bazel/bazel-linux_x64@2.1.0 >/dev/null
}

ensure_environment cpu examples test tf-keras tpu-compiler
if [[ -z ${BAZEL:-} ]]; then
  if is_suitable bazel; then
    BAZEL=bazel
  elif install_with_apt && is_suitable /usr/bin/bazel; then
    BAZEL=/usr/bin/bazel
  else
    BAZEL=$npm_bazel
    [[ -x $npm_bazel ]] || install_with_npm
  fi
fi
echo "[bazel_test] $BAZEL: $("$BAZEL" --version)" >&2

export PATH="$PWD/.venv/bin:$PATH"
"$BAZEL" build //...
targets=(//...)
if [[ " $* " == *" //"* ]]; then targets=(); fi
"$BAZEL" test "$@" "${targets[@]}"
