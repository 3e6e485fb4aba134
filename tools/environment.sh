# Makes .venv and installs this project into it, editable, with some extras. If
# .venv has a copy of this project that is not editable, installs a new copy.
#
# Sourced by the other scripts, with the project root as working directory:
#
#   source tools/environment.sh
#   ensure_environment cpu examples test
#
# PYTHON chooses the interpreter; without it the first suitable one is taken.
# A second call installs nothing. A virtual environment of the user's own
# that is already called .venv is used as it is, and never deleted.

_made_by_us=.venv/made_by_tf_cross_shard  # Only then may it be made anew.
_stamp=.venv/installed_by_tf_cross_shard  # Written last: what is in place.

_say() { echo "[environment] $*" >&2; }

# Succeeds when $1 runs and is a Python that TensorFlow has wheels for.
_is_suitable() {
  "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
    2>/dev/null
}

# Prints the interpreter to make .venv with.
_find_python() {
  local candidate candidates seen="" without_venv=""
  candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  if [[ -n ${PYTHON:-} ]]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    # A shim of pyenv's is on PATH even when it cannot run: run it and see.
    "$candidate" -c '' 2>/dev/null || continue
    seen+=" $candidate ($("$candidate" -c \
      'import platform; print(platform.python_version())'))"
    _is_suitable "$candidate" || continue
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$candidate"
      return
    fi
    without_venv=$candidate
  done
  if [[ -n $without_venv ]]; then
    _say "$without_venv has no venv or ensurepip module. On Debian and" \
      "Ubuntu: apt-get install python3-venv. Or set PYTHON to another."
  else
    _say "This needs Python 3.10 to 3.13; found:${seen:- none}. Install" \
      "one, or set PYTHON to its path."
  fi
  return 1
}

# Succeeds when .venv can be installed into.
_is_usable() {
  _is_suitable .venv/bin/python || return 1
  .venv/bin/python -m pip --version >/dev/null 2>&1 || return 1
  # Another PYTHON than last time is a wish for another environment.
  [[ -z ${PYTHON:-} || ! -e $_made_by_us ]] ||
    [[ "$("$PYTHON" -c 'import sys; print(sys.version)')" == \
      "$(.venv/bin/python -c 'import sys; print(sys.version)')" ]]
}

_make_venv() {
  local python
  if [[ -e .venv && ! -e $_made_by_us ]]; then
    _say "$PWD/.venv is not ours and not usable (it needs Python 3.10 to" \
      "3.13 and pip). Move it away and run this again."
    return 1
  fi
  python=$(_find_python) || return
  rm -rf .venv
  mkdir .venv
  touch "$_made_by_us"  # First, so that a half-made one is made again.
  _say "making .venv with $python"
  "$python" -m venv .venv
}

# Prints a line that changes whenever the installation must be renewed: the
# requirements, the interpreter or the place of the sources.
_fingerprint() {
  .venv/bin/python - <<'EOF'
import configparser, hashlib, os, sys
config = configparser.ConfigParser(interpolation=None)
config.read("setup.cfg")
facts = [sys.version, os.path.realpath(os.curdir)]
facts += [
  f"{section} {dict(config[section])}"
  for section in config.sections()
  if section.split(".")[0] in ("metadata", "options")
]
print(hashlib.sha256("\n".join(facts).encode()).hexdigest())
EOF
}

# Prints the extras to ask pip for, given the wanted ones. A TensorFlow that is
# there already stays, whatever its flavour: two of them share their files.
# tf_keras, which would bring another one, is installed apart.
_extras_for_pip() {
  .venv/bin/python - "$@" <<'EOF'
import importlib.util, sys
from importlib import metadata

def is_installed(distribution):
  try:
    metadata.version(distribution)
  except metadata.PackageNotFoundError:
    return False
  return True

extras = set(sys.argv[1:]) - {"tf-keras"}
if extras & {"cpu", "tensorflow"} and importlib.util.find_spec("tensorflow"):
  extras -= {"cpu", "tensorflow"}
  if is_installed("tensorflow"):
    extras.add("tensorflow")
  elif is_installed("tensorflow-cpu"):
    extras.add("cpu")
print(",".join(sorted(extras)))
EOF
}

# Prints the requirement of the tf_keras that belongs to the TensorFlow here.
_tf_keras_for_pip() {
  .venv/bin/python - <<'EOF'
from importlib import metadata

distribution = metadata.packages_distributions()["tensorflow"][0]
major, minor, _ = metadata.version(distribution).split(".", 2)
print(f"tf_keras~={major}.{minor}.0")
EOF
}

# Prints "--editable", unless the user has installed a copy of this project.
_editable() {
  # Isolated (-I), since the build of a copy leaves metadata in this folder.
  .venv/bin/python -I - <<'EOF'
import json
from importlib import metadata

try:
  # pip writes this file for what it has installed from a folder.
  found = metadata.distribution("tf-cross-shard").read_text("direct_url.json")
except metadata.PackageNotFoundError:
  found = None
folder = json.loads(found or '{"dir_info": {"editable": true}}').get("dir_info")
if folder is None or folder.get("editable"):
  print("--editable")
EOF
}

# ensure_environment EXTRA...: afterwards .venv/bin/python has them all.
ensure_environment() {
  # A subshell, so that no setting of ours reaches the calling script. It must
  # not stand in an `if` or before `||`, which would switch `set -e` off.
  (
    set -euo pipefail
    unset PYTHONHOME  # Belongs to another interpreter than .venv's.
    _is_usable || _make_venv

    fingerprint=$(_fingerprint)
    recorded="" installed=""
    if [[ -e $_stamp ]]; then
      { read -r recorded && read -r installed; } <"$_stamp" || true
    fi
    missing=""
    for extra in "$@"; do
      [[ " $installed " == *" $extra "* ]] || missing+=" $extra"
    done
    if [[ $recorded == "$fingerprint" && -z $missing ]]; then
      exit 0
    fi

    rm -f "$_stamp"
    extras=$(printf '%s\n' $installed "$@" | sort -u | tr '\n' ' ')
    _say "installing tf-cross-shard with: ${extras% } (this takes minutes," \
      "once)"
    pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check install)
    # The pip that Python 3.10 and 3.12 bring searches for ever among
    # TensorFlow's dependencies.
    PIP_USER=0 "${pip[@]}" "pip>=24.1"
    # PEP 517 is not every pip's default, and the older way puts the project
    # first on sys.path instead of last.
    PIP_USER=0 PYTHONWARNINGS=ignore "${pip[@]}" --use-pep517 \
      $(_editable) ".[$(_extras_for_pip $extras)]"
    if [[ " $extras" == *" tf-keras "* ]]; then
      # Its one requirement is `tensorflow` of the same minor version, whose
      # files would overwrite those of tensorflow-cpu.
      tf_keras=$(_tf_keras_for_pip)
      PIP_USER=0 "${pip[@]}" --no-deps "$tf_keras"
    fi
    printf '%s\n' "$fingerprint" "${extras% }" >"$_stamp.new"
    mv "$_stamp.new" "$_stamp"
  )
}

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
