"""The GPU hours of Table 1, estimated: python configs/paper/gpu_hours.py

Prints the table of docs/cost.md. Put your own data's tokens and a speed that you measured in.
"""

PARAMETERS = {"Mistral 7B": 7.24e9, "Llama 3.1 8B": 8.03e9, "Gemma 2 2B": 2.61e9}

# Conversations, as the hub's page of each data set counts them, times tokens of each. Alpaca's were
# counted with its prompt, by a BPE of 60,000 entries trained on it; `mean_length` in
# FOLDER/training.jsonl of benchmarks/training.py is the same count of what that trains on. Tulu 3's
# follow from the 2.9 GB that its page states, at four bytes a token. OpenHermes's 500 are a guess.
TOKENS = {"Alpaca": 52_002 * 109, "Tulu 3": 939_343 * 770, "OpenHermes 2.5": 1_001_551 * 500}

RUNS_OF_A_MODEL_AND_DATA_SET = 8  # two β × four learning rates
EPOCHS = 2

# Tokens/s × 6 FLOP a parameter × parameters, as measured without gradient checkpointing.
SWEEPS = 43_649 * 6 * 1.54e9  # the sweeps' trainer, Qwen2.5 1.5B on one H200
OPEN_INSTRUCT = 41_682 * 6 * 1.24e9 / 2  # open-instruct, Llama 3.2 1B on two H200s
FLOP_A_PARAMETER = 8  # 6, and 2 that gradient checkpointing, which Table 1 turns on, computes again


def hours(parameters: float, flop_per_second: float) -> float:
    """Return the GPU hours of all runs of a model of so many parameters."""
    tokens = sum(TOKENS.values()) * EPOCHS * RUNS_OF_A_MODEL_AND_DATA_SET
    return FLOP_A_PARAMETER * parameters * tokens / flop_per_second / 3600


def main() -> None:
    speeds = {"the sweeps' trainer": SWEEPS, "open-instruct": OPEN_INSTRUCT}
    titles = [f"at {name}'s speed, {speed / 1e12:.0f} TFLOP/s" for name, speed in speeds.items()]
    print("| GPU hours |", " | ".join(titles), "|")
    print("|---" * (1 + len(speeds)) + "|")
    for name, parameters in PARAMETERS.items():
        cells = [f"{hours(parameters, speed):,.0f}" for speed in speeds.values()]
        print(f"| {name}, 24 runs |", " | ".join(cells), "|")
    totals = [f"{hours(sum(PARAMETERS.values()), speed):,.0f}" for speed in speeds.values()]
    print("| all 72 runs |", " | ".join(totals), "|")


if __name__ == "__main__":
    main()
