#!/bin/bash
# The paper's claims on Gemma 3 270M, as eval/RESULTS.md reports them, on this machine's GPUs.
#
#   bash slurm/prefetch.sh --config configs/sweeps/gemma.yaml     where there is internet
#   bash slurm/claims.sh [PART …] [key=value …]                   all parts, or those named
#   bash slurm/claims.sh report                                   one report of what there is
#
#   grid        4 learning rates × 6 label-smoothing factors; the rate with the lowest held-out loss
#               at β = 0 is that of all other parts (or RATE=2e-5)
#   seeds       6 factors × 5 seeds, and the entropy of what they write
#   vocabulary  embedding and head cut to 73,728 and 8,192 entries
#   softcap     logits capped at 30 and 50
#   reduction   the summed loss, clipped, and the mean of micro-batches
#   filter      the filtered gradient, and the paper's own filter
#   epochs      the whole of Alpaca once and twice
#   after       temperature and ATS fitted on MMLU's val questions after β = 0
#
# Finished runs are kept: the same command goes on. key=value overrides every part, for example
# workers=8 for eight runs at a time.

project=$(cd "$(dirname "$0")/.." && pwd)
set -euo pipefail
parts=() overrides=()
for word in "$@"; do
    case $word in
    *=*) overrides+=("$word") ;;
    -h | --help) sed -n '/^# /,$ { /^$/q; s/^#\( \|$\)//p }' "$0"; exit 0 ;;
    grid | seeds | vocabulary | softcap | reduction | filter | epochs | after | report) parts+=("$word") ;;
    *) echo "error: $word: no such part; bash slurm/claims.sh --help" >&2; exit 2 ;;
    esac
done
[[ ${#parts[@]} -gt 0 ]] || parts=(grid seeds vocabulary softcap reduction filter epochs after report)
cd "$project"
sweeps=runs/gemma/sweeps

PYTHON=${PYTHON:-python3}
[[ ! -x .venv/bin/python ]] || PYTHON=.venv/bin/python
export PYTHON PYTHONPATH=$project/kernel:$project/slurm:$project/eval${PYTHONPATH:+:$PYTHONPATH}

sweep() { # NAME key=value … : one sweep, trained, scored and tabulated
    bash slurm/sweeps.sh launch configs/sweeps/gemma.yaml --executor local \
        "name=gemma-$1" "${@:2}" "${overrides[@]+"${overrides[@]}"}"
}

rate() { # the learning rate that `grid` chose
    [[ -z ${RATE:-} ]] || { echo "$RATE"; return; }
    "$PYTHON" - "$sweeps/gemma-grid/best_learning_rates.csv" <<'END'
import csv, sys
try:
    rows = list(csv.DictReader(open(sys.argv[1])))
    print(next(row["best_learning_rate"] for row in rows if float(row["label_smoothing"]) == 0))
except (OSError, KeyError, StopIteration):
    sys.exit(f"error: {sys.argv[1]} does not name a rate yet: run the part grid, or give RATE=2e-5")
END
}

calibrate() { # RUN SEED RATE: both calibrators of a run, its test questions with each, two lines for the index
    local method task=(--task mmlu --data data/mmlu --shots 5 --model "$1/model" --batch-size 128)
    for method in temperature ats; do
        [[ -e $1/$method ]] || "$PYTHON" -m calibeval "fit-$method" "${task[@]}" --split val --out "$1/$method"
        "$PYTHON" -m calibeval score "${task[@]}" --calibrator "$1/$method" --out "$1/scores/mmlu-$method.jsonl"
    done > "$1/calibrators.log" 2>&1 || { echo "failed: $1/calibrators.log" >&2; return 1; }
}

after() {
    local index=$sweeps/gemma-seeds/index.jsonl gpus number=0 waiting=() run
    [[ -f $index ]] || { echo "error: $index: no such file: run the part seeds first" >&2; exit 2; }
    gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | wc -l)
    mkdir -p "$sweeps/gemma-after"
    "$PYTHON" - "$index" "$sweeps/gemma-after" <<'END'
import json, pathlib, sys
rows = map(json.loads, open(sys.argv[1]))
rows = [row for row in rows if row["dataset"] == "mmlu" and row["label_smoothing"] == 0]
folder = pathlib.Path(sys.argv[2])
with open(folder / "index.jsonl", "w") as out:
    for row in rows:
        for name in ("temperature", "ats"):
            records = row["records"].replace("mmlu.jsonl", f"mmlu-{name}.jsonl")
            print(json.dumps(row | {"records": records, "calibrator": name}), file=out)
(folder / "runs").write_text("".join(row["records"].rsplit("/", 2)[0] + "\n" for row in rows))
END
    while read -r run; do
        CUDA_VISIBLE_DEVICES=$((number++ % gpus)) calibrate "$sweeps/gemma-after/$run" & waiting+=($!)
    done < "$sweeps/gemma-after/runs"
    for number in "${waiting[@]}"; do wait "$number"; done
}

report() { # everything that the parts have indexed, in one place
    mkdir -p "$sweeps/all"
    cat $sweeps/gemma-*/index.jsonl | sort -u > "$sweeps/all/index.jsonl"
    "$PYTHON" -m calibeval collect "$sweeps/all/index.jsonl" --out "$sweeps/all/results"
}

# What the verdicts rest on; the grid and its seeds are scored by letters everywhere, too.
tasks='score.tasks=[
    {task: mmlu, data: data/mmlu, shots: 5, scoring: letters},
    {task: arc_easy, name: arc-continuation, data: data/arc/ARC-Easy, shots: 0, scoring: continuation},
    {task: hellaswag, name: hellaswag-continuation, data: data/hellaswag/hellaswag_val.jsonl, shots: 0, scoring: continuation}]'
entropy='score.entropy={data: data/alpaca/alpaca_data.json, skip: 30000, temperatures: [1.0, 0.9, 0.8]}'
for part in "${parts[@]}"; do
    at=() pair=('grid.label_smoothing=[0.0,0.1]' 'grid.seed=[0,1,2]' "$tasks")
    [[ $part == @(grid|after|report) ]] || { chosen=$(rate); at=("grid.learning_rate=[$chosen]"); }
    case $part in
    grid) sweep grid keep=all ;;
    seeds) sweep seeds keep=all "${at[@]}" 'grid.seed=[0,1,2,3,4]' "$entropy" ;;
    vocabulary) sweep vocabulary "${at[@]}" "${pair[@]}" 'grid.model_name_or_path=[models/gemma-74k,models/gemma-8k]' ;;
    softcap) sweep softcap "${at[@]}" "${pair[@]}" 'grid.final_logit_softcapping=[30.0,50.0]' ;;
    reduction)
        sweep sum "${at[@]}" "${pair[@]}" 'grid.reduce_loss=[sum]' 'grid.clip_grad_norm=[1.0]'
        sweep mean "${at[@]}" "${pair[@]}" 'grid.reduce_loss=[mean]' \
            train.per_device_train_batch_size=16 train.gradient_accumulation_steps=4 ;;
    filter)
        sweep filtered "${at[@]}" "${pair[@]}" 'grid.filter_eps=[auto]'
        sweep paper-filter "${at[@]}" "${pair[@]}" 'grid.filter_eps=[auto]' 'grid.loss_implementation=[paper]' ;;
    epochs) sweep epochs "${at[@]}" "${pair[@]}" train.max_train_samples=null 'grid.num_train_epochs=[1,2]' ;;
    *) $part ;;
    esac
done
