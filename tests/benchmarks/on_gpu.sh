#!/bin/sh
# What only a GPU can show, unattended and without a network:
#
#     [OUT=folder] [WHEELS=folder] tests/benchmarks/on_gpu.sh MINUTES [tests] [sweep] [gpu] [kernels] ...
#
# Without names it takes these four steps; the name of any other suite is a step as well. Each step gets a share of the
# minutes that are left and is interrupted when they are over: what was measured until then stays. Wheels are those of
# WHEELS (default: .whl): what the machine lacks of attnbench[gpu], pytest, pytest-xdist and pytest-timeout. OUT
# (default: build/on-gpu) gets a log of each step, the rows, and runs.tar.gz, which holds the rows and runs, with samples
# where they are small. TESTS names tests in place of all that need a GPU, and ONLY is for suites what -k of attnbench
# run is. DEVICE=cpu tries all of it with tiny shapes.
set -u
cd "$(dirname "$0")/../.." || exit
minutes=${1:?minutes}
shift
[ $# -gt 0 ] || set -- tests sweep gpu kernels
end=$(($(date +%s) + minutes * 60 - 20)) # the rest is for packing
OUT=${OUT:-build/on-gpu}
DEVICE=${DEVICE:-cuda}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && site=$(mktemp -d) || exit

wheels() {
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$@"
}

if ls "${WHEELS:-.whl}"/*.whl >/dev/null 2>&1 && ! wheels "${WHEELS:-.whl}"/*.whl; then
    for wheel in "${WHEELS:-.whl}"/*.whl; do # one that is not for this machine keeps no other from being installed
        wheels "$wheel" || echo "$wheel was not installed"
    done
fi
export PYTHONPATH="$site:$PWD:$PWD/plugins/peers${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
case $DEVICE in cpu) tiny="--n 64 128 --heads 2 --head-dim 16 --dtype float32 --only sdpa,linear,gla" ;; *) tiny="" ;; esac

left() {
    echo $((end - $(date +%s)))
}

# step NAME SHARE COMMAND...: at most this share, in percent, of the time that is left.
step() {
    name=$1
    limit=$(($(left) * $2 / 100))
    shift 2
    if [ "$limit" -lt 10 ]; then
        echo "== $name: no time left"
        return
    fi
    echo "== $name, at most $limit s"
    begun=$(date +%s)
    timeout -s INT -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: exit $? after $(($(date +%s) - begun)) s"
    tail -n "${LINES_SHOWN:-30}" "$OUT/$name.log" | cut -c 1-220
}

{
    timeout 30 nvidia-smi
    python3 -m pip list 2>/dev/null | grep -iE '^(torch|triton|fla|numpy|nvidia-(cudnn|ml)|pytest)'
    timeout 60 python3 -m attnbench env
} >"$OUT/machine.txt" 2>&1
tail -n 60 "$OUT/machine.txt" | cut -c 1-160

count=$#
for what in "$@"; do
    share=$((count > 1 ? 180 / (count + 1) : 100)) # a little more than an equal part, since most end before
    case $what in
    tests)
        # Only files that have such a test: to collect all of them takes longer than to run these.
        # shellcheck disable=SC2046,SC2086  # names without spaces
        step tests "$share" python3 -m pytest -v -m cuda -n $((($(nproc) + 1) / 2)) --timeout 120 --tb=short -rE \
            -p no:cacheprovider -p no:benchmark -p tests.benchmarks.at_once --continue-on-collection-errors \
            -W ignore::DeprecationWarning -W ignore::FutureWarning \
            ${TESTS:-$(grep -rl 'mark\.cuda' tests plugins/peers/tests --include='*.py' | grep -v conftest)}
        grep -E '^\[.*(FAILED|ERROR)|^(FAILED|ERROR) ' "$OUT/tests.log" | cut -c 1-200 | sort -u >"$OUT/failed.txt"
        ;;
    sweep)
        seconds=$(($(left) * share / 100))
        # shellcheck disable=SC2086  # options
        step sweep "$share" python3 tests/benchmarks/on_gpu.py "$OUT/sweep.jsonl" --device "$DEVICE" --warm 8 \
            --minutes "$(echo "$seconds" | awk '{ print ($1 - 5) / 60 }')" $tiny
        ;;
    *)
        if [ "$DEVICE" = cpu ]; then
            step "$what" "$share" python3 -m attnbench run "$what" --device cpu --out "$OUT/runs" --quick \
                --set seq_len=64 --set batch=1 --dtype float32 -k 'sdpa and forward'
        else
            step "$what" "$share" python3 -m attnbench run "$what" --device cuda --out "$OUT/runs" ${ONLY:+-k "$ONLY"}
        fi
        ;;
    esac
    count=$((count - 1))
done

cd "$OUT" || exit
rm -rf "$site" # first, since the disk may be full
find . -type f ! -name .lock ! -name runs.tar.gz ! \( -name samples.jsonl -size +10M \) | tar czf runs.tar.gz -T -
ls -l runs.tar.gz
