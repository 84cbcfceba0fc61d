#!/bin/sh
# data/get_text.sh OUT: 25 MB of public-domain English prose as OUT/*.txt, out of four Debian packages.
# Needs apt-get, dpkg-deb and build/extract_text (or $BUILD/extract_text); no root, unless package lists are missing.
# Does nothing when the texts are there already.
set -eu

packages="r-cran-janeaustenr sword-comm-tdavid sword-comm-mhcc sword-text-web"
texts="austen tdavid mhcc web"

fail() {
    echo "get_text.sh: $*" >&2
    exit 2
}

case ${1-} in
--help)
    sed -n '2,4s/^# //p' "$0"
    exit 0
    ;;
-*) fail "unknown option '$1'; --help explains" ;;
esac
[ $# -eq 1 ] || fail "expected one argument, the folder for the texts"
case $1 in /*) out=$1 ;; *) out=$PWD/$1 ;; esac
extract=${BUILD:-$(dirname "$0")/../build}/extract_text
case $extract in /*) ;; *) extract=$PWD/$extract ;; esac

missing=
for text in $texts; do
    [ -s "$out/$text.txt" ] || missing="$missing $text"
done
if [ -z "$missing" ]; then
    echo "texts are in $1 already"
    exit 0
fi

[ -x "$extract" ] || fail "$extract is not built; run: make"
for tool in apt-get dpkg-deb; do
    command -v $tool > /dev/null || fail "$tool is needed to fetch $packages; texts of your own do as well"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM HUP
cd "$work"

# As root, apt would warn that its own user cannot write here; fetched files are checked all the same.
download() {
    apt-get -q -o APT::Sandbox::User="$(id -un)" download $packages > download.log 2>&1
}

echo "fetching $packages"
if ! download; then
    hint="try: sudo apt-get update"
    if [ "$(id -u)" -eq 0 ]; then
        hint="apt-get update did not help"
        echo "updating the package lists first"
        apt-get -q update > update.log 2>&1 && download && hint=
    fi
    [ -z "$hint" ] || fail "cannot download the packages ($(grep '^E:' download.log | head -n 1)); $hint"
fi
for package in *.deb; do
    dpkg-deb -x "$package" unpacked
done
"$extract" unpacked "$out"
