# Makes .venv and installs this project into it, editable, with some extras.
#
# Sourced by the other scripts, with the project root as working directory:
#
#   source tools/environment.sh
#   ensure_environment cpu examples test
#
# A second call installs nothing. PYTHON chooses the interpreter with which .venv
# is made. A virtual environment of the user's own that is called .venv is used
# as it is, and never deleted.

_made_by_us=.venv/made_by_tf_cross_shard  # Only then may it be made anew.
_stamp=.venv/installed_by_tf_cross_shard  # A line for each extra in place.

_say() { echo "[environment] $*" >&2; }

# Succeeds if $1 is a Python that TensorFlow has wheels for, with the modules $2.
_is_suitable() {
  "$1" -c "import sys, $2; sys.exit(not (3, 10) <= sys.version_info < (3, 14))"
} 2>/dev/null

_make_venv() {
  local python candidates=(python3 python3.1{3,2,1,0})
  if [[ -e .venv && ! -e $_made_by_us ]]; then
    _say "$PWD/.venv is not ours and not usable (it needs Python 3.10 to 3.13" \
      "and pip). Move it away and run this again."
    return 1
  fi
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for python in "${candidates[@]}"; do
    _is_suitable "$python" "ensurepip, venv" || continue
    _say "making .venv with $python"
    rm -rf .venv
    mkdir .venv
    touch "$_made_by_us"  # First, so that a half-made one is made again.
    "$python" -m venv .venv
    return
  done
  _say "none of ${candidates[*]} is Python 3.10 to 3.13 with the modules venv and" \
    "ensurepip. Install python3-venv (Debian, Ubuntu), or set PYTHON to a path."
  return 1
}

# ensure_environment EXTRA...: afterwards .venv/bin/python has them all. A
# subshell, so that no setting reaches the caller. Do not call it in an `if` or
# before `||`, which would switch `set -e` off.
ensure_environment() (
  set -euo pipefail
  unset PYTHONHOME  # Belongs to another interpreter than .venv's.
  export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
  pip=(.venv/bin/python -m pip install)
  _is_suitable .venv/bin/python pip || _make_venv
  # Install again if the requirements or the place of the sources change.
  state="$PWD $(sed '/^\[tool:pytest\]/,$d' setup.cfg | cksum)"
  missing=()
  for extra in "$@"; do
    grep -qsxF "$extra $state" "$_stamp" || missing+=("$extra")
  done
  if [[ -z ${missing:-} ]]; then exit; fi
  _say "installing tf-cross-shard with: ${missing[*]} (this takes minutes, once)"
  # The pip that Python 3.10 and 3.12 bring searches for ever among TensorFlow's
  # dependencies.
  "${pip[@]}" "pip>=24.1"
  extras=" ${missing[*]} "
  # tf_keras requires `tensorflow`, whose files would overwrite those of
  # tensorflow-cpu. For the same reason, a TensorFlow that is there stays.
  extras=${extras/ tf-keras / }
  if .venv/bin/python -c 'import importlib.util as util, sys
sys.exit(util.find_spec("tensorflow") is None)'; then
    extras=${extras/ cpu / }
    extras=${extras/ tensorflow / }
  fi
  extras=$(xargs <<<"$extras")
  # Without PEP 517, pip puts the project first on sys.path instead of last.
  PYTHONWARNINGS=ignore "${pip[@]}" --use-pep517 --editable \
    ".${extras:+[${extras// /,}]}"
  if [[ " ${missing[*]} " == *" tf-keras "* ]]; then
    version=$(.venv/bin/python -c 'from importlib import metadata
name = metadata.packages_distributions()["tensorflow"][0]
print(metadata.version(name).rsplit(".", 1)[0])')
    "${pip[@]}" --no-deps "tf_keras~=$version.0"
  fi
  for extra in "${missing[@]}"; do echo "$extra $state"; done >>"$_stamp"
)

# ensure_apart FOLDER STAMP WHAT: makes FOLDER, a virtual environment for what
# would overwrite files in .venv. The caller's `install_apart PIP...` installs
# into it. Where that fails, says so, and ends the script with success.
ensure_apart() {
  local folder=$1 stamp=$1/installed_$2 what=$3
  local pip=("$1/bin/python" -m pip --quiet --disable-pip-version-check install)
  if [[ -e $stamp ]]; then return; fi
  _say "installing $what into $folder (minutes, once)"
  rm -rf "$folder"
  if ! { "${PYTHON:-python3}" -m venv "$folder" && "${pip[@]}" "pip>=24.1" &&
    install_apart "${pip[@]}" && touch "$stamp"; }; then
    rm -rf "$folder"
    _say "$what cannot be installed here: NOT CHECKED"
    exit 0
  fi
}
