#!/usr/bin/env bash
# patches/apply.sh CHECKOUT            apply the series to an open-instruct checkout
# patches/apply.sh CHECKOUT --check    say whether it is applied: exit 0 yes, 1 no, 2 it cannot be
# patches/apply.sh CHECKOUT --reverse  undo it
#
# The file that they change decides, not the commit. It is merged with the one that UPSTREAM names, so that changes
# of its own stay; where they touch a place at which the patches add lines, nothing is written.
#
# There are four versions of that file here, beside the checkout's own:
#   before      upstream's, at the commit that UPSTREAM names; git's id of it is `blob_before`
#   after       `before` with the patches; git's id of it is `blob_after`
#   unpatched   the checkout's without the patches' lines; the same as the checkout's if it holds none
#   merged      `unpatched` with the patches
# What gets written is `merged`, and to undo the patches `unpatched`.
# A checkout whose file holds lines of the patches is patched if it equals `merged`; else it holds some of them only, or
# at other places, and is refused.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: apply.sh CHECKOUT [--check|--reverse]"

# What a checkout's lines hold that a terminal would obey is left out.
fail() {
  printf 'error: %s\n' "$1" | LC_ALL=C sed $'s/\xc2[\x80-\x9f]//g' | LC_ALL=C tr -d '\000-\010\013-\037\177' >&2
  exit 2
}

# A checkout may be somebody else's: git is given a minute, where there is `timeout`.
git() {
  if type -P timeout > /dev/null; then timeout 60 git "$@"; else command git "$@"; fi
}

# without_blocks DIFF FILE: print FILE without the blocks of lines that DIFF, as `diff` prints it, says were added. They
# come in the file's order: the file is walked once, and each block is dropped where it first occurs behind the one
# before. Fails where a block does not occur.
without_blocks() {
  awk '
    FILENAME == ARGV[1] {
      if (/^>/) {
        size[blocks]++
        block[blocks, size[blocks]] = substr($0, 3)
      } else {
        blocks++
      }
      next
    }
    { line[++last] = $0 }
    END {
      at = 1
      for (b = 1; b <= blocks; b++) {
        for (place = at; place <= last; place++) {
          for (k = 1; k <= size[b] && line[place + k - 1] == block[b, k]; k++);
          if (k > size[b]) break
        }
        if (place > last) exit 1
        while (at < place) print line[at++]
        at += size[b]
      }
      while (at <= last) print line[at++]
    }' "$1" - < "$2" # not as an argument: awk would take one such as beta=0.1/FILE for an assignment
}

checkout= action=apply
for argument; do
  case $argument in
    --check | --reverse)
      [ "$action" = apply ] || fail "one of --check and --reverse only; $usage"
      action=${argument#--} ;;
    -h | --help) echo "$usage"; exit ;;
    -*) fail "unknown option $argument; $usage" ;;
    *) [ -z "$checkout" ] || fail "one checkout only; $usage"; checkout=$argument ;;
  esac
done
[ -n "$checkout" ] || fail "$usage"

commit=$(awk '$1 == "commit" {print $2}' "$here/UPSTREAM")
read -r blob_before file < <(awk '$1 == "blob" {print $2, $3}' "$here/UPSTREAM")
patches=("$here"/[0-9]*.patch)
blob_after=$(sed -n 's/^index [0-9a-f]*\.\.\([0-9a-f]*\) .*/\1/p' "${patches[-1]}")
repository=$(awk '$1 == "repository" {print $2}' "$here/UPSTREAM")
get="git clone $repository FOLDER && git -C FOLDER checkout $commit"

[ -d "$checkout" ] || fail "$checkout is not a folder; to get a checkout: $get"
target=$checkout/$file
[ -f "$target" ] || fail "$checkout has no $file, so it is no open-instruct checkout; to get one: $get"
[ ! -L "$target" ] || fail "$file in $checkout is a link, whose target would be shown and changed: copy the file there"
[ "$(wc -c < "$target")" -lt 4000000 ] || fail "$file in $checkout has more than 4 MB, so it is not open-instruct's"
! grep -q $'\r$' "$target" ||
  fail "$file in $checkout ends its lines as on Windows (git's core.autocrlf), and the patches do not, so nothing was changed: sed -i 's/\\r\$//' $target"
# A partial clone would fetch what it lacks, by a program that its own configuration may name.
export GIT_NO_LAZY_FETCH=1 GIT_ALLOW_PROTOCOL=none
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
work=$(cd "$work" && pwd -P)
# In a folder of a repository, `git apply` would skip the files of the patches and succeed. It looks for one in $work, and
# goes no further up than the folder below a ceiling.
export GIT_CEILING_DIRECTORIES=${work%/*}
before=$work/before
after=$work/after
unpatched=$work/unpatched
merged=$work/merged

# git applies the patches, and undoes them, only at the path that they name.
path_in_patches=$work/$file
mkdir -p "${path_in_patches%/*}"
apply_patches() { (cd "$work" && git apply --unidiff-zero "${patches[@]}"); }
undo_patches() {
  local i
  for ((i = ${#patches[@]} - 1; i >= 0; i--)); do
    (cd "$work" && git apply --unidiff-zero --reverse "${patches[i]}") || return
  done
}
blob_of() { git hash-object --no-filters "$1"; }
damaged="the patches in $here are not as they were recorded (their index lines name another result); $checkout is left as it is: take $here afresh from this project"

case $(blob_of "$target") in
  "$blob_before") cp "$target" "$path_in_patches" ;;
  "$blob_after")
    cp "$target" "$path_in_patches"
    undo_patches && [ "$(blob_of "$path_in_patches")" = "$blob_before" ] || fail "$damaged" ;;
  *) git -C "$checkout" cat-file blob "$blob_before" > "$path_in_patches" 2> /dev/null ||
    fail "$file in $checkout is not that of ${commit:0:12}, and its repository lacks that commit (another project, a shallow clone or an archive), so that it cannot be merged with the patches; in full: $get. The runner needs no line of it changed: python -m smoothed_open_instruct $checkout …" ;;
esac
cp "$path_in_patches" "$before"
apply_patches && [ "$(blob_of "$path_in_patches")" = "$blob_after" ] || fail "$damaged"
cp "$path_in_patches" "$after"

# Matches a line that names this package, which the patches import `as ours`. Not all of the patches' lines do: a `break`
# that they add goes unseen here.
names_ours=' as ours$|\bours\.'
# The checkout's lines that name `ours` and are not lines of `after`. They are another version's of these patches, or of a
# variable `ours` of the checkout's own, which would hide the import.
unknown_lines=$(grep -E "$names_ours" "$target" | grep -vxF -f <(grep -E "$names_ours" "$after") | sed 's/^/  /' || true)
[ -z "$unknown_lines" ] ||
  fail "$file in $checkout holds lines of another version of these patches, or a variable \`ours\` of its own, which would hide their import: rename that, or undo them with the apply.sh that came with them, or patch a second checkout ($get):"$'\n'"$unknown_lines"

patched_already=no
cp "$target" "$unpatched"
if grep -qE "$names_ours" "$target"; then
  patched_already=yes
  # Where lines of the patches are missing, `merged` differs from the checkout's file below, and it is refused.
  without_blocks <(diff "$before" "$after") "$target" > "$unpatched" || cp "$target" "$unpatched"
fi
runner="The runner needs no line of it changed: python -m smoothed_open_instruct $checkout …"
# Where the checkout's changes and the patches clash, the checkout's own lines are shown, with "..." after each clash. After
# the 40th line nothing more is shown. The style of conflicts is set since the user's may be diff3, which
# prints the lines of `before` as well.
if ! git -c merge.conflictStyle=merge merge-file -p --quiet "$unpatched" "$before" "$after" > "$merged"; then
  clash=$(awk '
    /^<<<<<<< / { mine = 1; next }
    /^=======$/ { mine = 0 }
    /^>>>>>>> / && shown <= 40 { print "  ..." }
    mine {
      shown++
      if (shown <= 40) print "  " $0
    }' "$merged")
  if [ "$patched_already" = yes ] && ! grep -qv '^  \.\.\.$' <<< "$clash"; then
    missing=$(diff "$before" "$after" | sed -n 's/^> //p' | grep -vxF -f "$target" || true)
    fail "$file in $checkout lacks lines of these patches, so nothing was changed. Put them back, or take the file back (git -C $checkout checkout -- $file; save changes of your own first) and run this again. Missing:"$'\n'"$missing"
  fi
  fail "$file in $checkout differs from that of ${commit:0:12} where the patches add lines, so nothing was changed. $runner Or move your changes off these lines, or patch a second checkout ($get) and carry them over. Your lines there:"$'\n'"$clash"
fi
[ "$patched_already" = no ] || cmp -s "$target" "$merged" ||
  fail "$file in $checkout holds lines of these patches at other places than theirs, or some of them only (plain \`git apply\` adds them at the end of the file), so nothing was changed. Take the file back (git -C $checkout checkout -- $file; save changes of your own first) and run this again"

result=$merged
case $action,$patched_already in
  check,yes) echo "patched: $checkout (${#patches[@]} patches for ${commit:0:12})"; exit ;;
  check,no) echo "not patched: $checkout; to patch it: $here/apply.sh $checkout"; exit 1 ;;
  apply,yes) echo "already patched: $checkout"; exit ;;
  reverse,no) echo "not patched, nothing to undo: $checkout"; exit ;;
  reverse,yes) result=$unpatched ;;
esac
new=$(mktemp "$target.XXXXXX") # a name that nobody can have put a link at
cp -p "$target" "$new"
cat "$result" > "$new"
mv "$new" "$target"
[ "$action" = reverse ] && { echo "patches undone: $checkout"; exit; }
needs="the packages smoothce and smoothed-open-instruct, from where this script is from"
project=$(dirname "$here")
[ ! -d "$project/kernel" ] || needs="smoothce: pip install $project/kernel $project/patches"
echo "patched: $checkout (${#patches[@]} patches for ${commit:0:12}); its Python needs $needs"
cmp -s "$target" "$after" || echo "its $file has other changes too, which were kept: look at \`git -C $checkout diff\`"
