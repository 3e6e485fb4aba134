#!/usr/bin/env bash
# Builds everything with Bazel, then tests. The arguments go to `bazel test`:
#
#   bash tools/bazel_test.sh                            # every test
#   bash tools/bazel_test.sh //tests:unit/core/groups_test  # one
#   bash tools/bazel_test.sh --test_tag_filters=slow   # as .ci/run does
#
# Fails when a test fails, when Bazel fails and when there is no test. BAZEL
# chooses the program; otherwise it is one on PATH, Debian's, or npm's, whichever
# is to be had first. Apart from that, and from what .venv needs, nothing is
# downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/environment.sh

say() { echo "[bazel_test] $*" >&2; }

npm_bazel=$PWD/.bazel/node_modules/@bazel/bazel-linux_x64
npm_bazel+=/bazel-2.1.0-linux-x86_64

# Succeeds when $1 is a Bazel that has the Python rules built in. Bazelisk is
# none: already to tell its version it downloads one.
is_suitable() {
  local path version
  path=$(command -v "$1") || return 1
  if [[ $(readlink -f "$path") == *bazelisk* ]] ||
    grep -aq bazelbuild/bazelisk "$path"; then
    say "$path is Bazelisk, which downloads: not used"
    return 1
  fi
  version=$("$1" --version 2>/dev/null | sed -n 's/^bazel //p') || return 1
  case $version in
    2.[1-9]* | [3-6].*) ;;
    no_version) ;;  # Debian's build does not know that it is 4.2.3.
    *)
      say "$path is Bazel ${version:-of unknown version}, not 2.1 to 6: not" \
        "used (set BAZEL=$path to insist)"
      return 1
      ;;
  esac
}

# Installs Debian's Bazel, which takes root.
install_with_apt() {
  local as_root=()
  command -v apt-get >/dev/null || return 1
  if [[ $(id -u) != 0 ]]; then
    sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  say "installing bazel-bootstrap with apt-get"
  export DEBIAN_FRONTEND=noninteractive
  local install=("${as_root[@]}" apt-get install -qq -y
    --no-install-recommends bazel-bootstrap)
  # Without an update the lists may be absent or name files that are gone.
  "${install[@]}" &>/dev/null || {
    "${as_root[@]}" apt-get update -qq && "${install[@]}"
  } >/dev/null || return 1
}

# Installs npm's Bazel into .bazel. Not the package @bazel/bazel: its program
# exits with 0 without running anything.
install_with_npm() {
  command -v npm >/dev/null || return 1
  [[ $(uname -sm) == "Linux x86_64" ]] || return 1
  say "installing @bazel/bazel-linux_x64 with npm into .bazel"
  npm install --silent --no-save --no-package-lock --no-audit --no-fund \
    --prefix .bazel @bazel/bazel-linux_x64@2.1.0 >/dev/null
}

# Prints the program to run.
find_bazel() {
  if [[ -n ${BAZEL:-} ]]; then
    echo "$BAZEL"
  elif command -v bazel >/dev/null && is_suitable bazel; then
    command -v bazel
  elif [[ -x $npm_bazel ]] && is_suitable "$npm_bazel"; then
    echo "$npm_bazel"
  elif install_with_apt && is_suitable /usr/bin/bazel; then
    echo /usr/bin/bazel
  elif install_with_npm && is_suitable "$npm_bazel"; then
    echo "$npm_bazel"
  else
    say "found no Bazel 2.1 to 6, and neither apt-get (bazel-bootstrap, as" \
      "root) nor npm (@bazel/bazel-linux_x64) could install one"
    return 1
  fi
}

ensure_environment cpu examples test tf-keras tpu-compiler
bazel=$(find_bazel)
say "$bazel: $("$bazel" --version)"

# Bazel refuses to work below a directory with a space in its name, and looks
# through links: there it gets a copy.
if [[ $PWD == *" "* ]]; then
  project=$PWD copy=$(mktemp -d)
  trap '"$bazel" clean --expunge &>/dev/null; rm -rf "$copy"' EXIT
  tar -cf - --exclude=./.venv --exclude='./.venv-*' --exclude=./.bazel \
    --exclude=./.git . |
    tar -xf - -C "$copy"
  ln -s "$project/.venv" "$copy/.venv"
  cd "$copy"
fi

export PATH="$PWD/.venv/bin:$PATH"
options=() targets=()
for argument in "$@"; do
  case $argument in
    -*) options+=("$argument") ;;
    *) targets+=("$argument") ;;
  esac
done
"$bazel" build //...
"$bazel" test "${options[@]}" -- "${targets[@]:-//...}"
