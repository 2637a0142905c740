#!/usr/bin/env bash
# patches/apply.sh CHECKOUT            apply the series to an open-instruct checkout
# patches/apply.sh CHECKOUT --check    say whether it is applied: exit 0 yes, 1 no, 2 cannot tell
# patches/apply.sh CHECKOUT --reverse  undo it
#
# CHECKOUT must be a git checkout at the commit that UPSTREAM names, with no other changes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: apply.sh CHECKOUT [--check|--reverse]"

fail() { echo "error: $1" >&2; exit 2; }

checkout= action=apply
for argument; do
  case $argument in
    --check | --reverse) action=${argument#--} ;;
    -h | --help) echo "$usage"; exit ;;
    -*) fail "unknown option $argument; $usage" ;;
    *) [ -z "$checkout" ] || fail "one checkout only; $usage"; checkout=$argument ;;
  esac
done
[ -n "$checkout" ] || fail "$usage"

repository=$(awk '$1 == "repository" {print $2}' "$here/UPSTREAM")
commit=$(awk '$1 == "commit" {print $2}' "$here/UPSTREAM")
read -r blob file < <(awk '$1 == "blob" {print $2, $3}' "$here/UPSTREAM")
patches=("$here"/[0-9]*.patch)
patched=$(sed -n 's/^index [0-9a-f]*\.\.\([0-9a-f]*\) .*/\1/p' "${patches[-1]}")
get="git clone $repository $checkout && git -C $checkout checkout $commit"

[ -d "$checkout" ] || fail "$checkout is not a folder; to get it: $get"
root=$(git -C "$checkout" rev-parse --show-toplevel) || fail "$checkout is not a git checkout; to get one: $get"
[ "$root" = "$(cd "$checkout" && pwd -P)" ] ||
  fail "$checkout is not the top of a git checkout (that is $root); to get open-instruct: $get"
head=$(git -C "$root" rev-parse --verify --quiet HEAD) || fail "$checkout has no commit; to get one: $get"
[ "$head" = "$commit" ] || git -C "$root" cat-file -e "$commit^{commit}" 2>/dev/null ||
  fail "$checkout is at commit ${head:0:12}, the patches are for ${commit:0:12}, which it lacks (another repository, or a shallow clone); to get one: git clone $repository FOLDER && git -C FOLDER checkout $commit"
[ "$head" = "$commit" ] ||
  fail "$checkout is at commit ${head:0:12}, the patches are for ${commit:0:12}: git -C $checkout checkout $commit"
others=$(git -C "$root" status --porcelain --untracked-files=no -- . ":(exclude)$file")
[ -z "$others" ] ||
  fail "$checkout has changes of its own (commit or stash them first):"$'\n'"$others"
[ -f "$root/$file" ] || fail "$checkout lacks $file: git -C $checkout checkout $file"
case $(git -C "$root" hash-object "$file") in
  "$blob") state=clean ;;
  "$patched") state=patched ;;
  *) fail "$file in $checkout is neither the upstream file nor the patched one (git -C $checkout diff $file shows how); to start over: git -C $checkout checkout $file" ;;
esac

case $action:$state in
  check:patched) echo "patched: $checkout (${#patches[@]} patches on ${commit:0:12})" ;;
  check:clean) echo "not patched: $checkout; to patch it: $here/apply.sh $checkout"; exit 1 ;;
  apply:patched) echo "already patched: $checkout" ;;
  apply:clean)
    git -C "$root" apply --unidiff-zero "${patches[@]}"
    if [ "$(git -C "$root" hash-object "$file")" != "$patched" ]; then
      git -C "$root" checkout --quiet -- "$file"
      fail "the patches in $here are not as they were recorded (their index lines name another result); $checkout is left unpatched: take $here afresh from this project"
    fi
    echo "patched: $checkout (${#patches[@]} patches on ${commit:0:12}); its Python needs smoothce: pip install $(dirname "$here")" ;;
  reverse:clean) echo "not patched, nothing to undo: $checkout" ;;
  reverse:patched)
    reversed=()
    for ((i = ${#patches[@]} - 1; i >= 0; i--)); do reversed+=("${patches[i]}"); done
    git -C "$root" apply --unidiff-zero --reverse "${reversed[@]}"
    echo "patches undone: $checkout" ;;
esac
