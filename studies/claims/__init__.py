"""The paper's claims on real models: README.md says what was found, `__main__` how it is run.

To add a model:

- Put it into models/NAME, as an ordinary Hugging Face folder with its tokenizer. An entry of
  studies/gguf/config.yaml does so for a GGUF file of a package index.
- If its tokenizer has no chat template, or does not write <bos> where the model needs it, add what
  `parts.model_overrides` has for Gemma. The part `script` refuses the template `alpaca`, which
  open-instruct's script does not have: name that part in a second command, with one that it has.
- `python -m studies.claims NAME` then does all parts and steps. A part has five seeds, or as many
  as `parts.PARTS` says; a model in `parts.MODELS_WITH_THREE_SEEDS` has three at most. Without
  OPEN_INSTRUCT_DIR the part `script` fails, and the others are done all the same. A row of a batch
  has `train.max_tokens` tokens, which 80 GB hold for 1.5B parameters; `train.max_tokens=4096`
  behind the command halves it. The part `script` fails of that key, which open-instruct's script
  does not have: name that part in a second command, without the key.
- For the figure's label, add an entry of `model_labels` in config.yaml. The forest plot draws every
  model that has records of three seeds or more.
- To publish its records, commit records/NAME.parquet, records/NAME/ and records/manifest.json. The
  tests ask which parts were not run (`NOT_RUN` in tests/studies/test_claims.py), and
  `python -m studies.claims.appendix` gives it a section of APPENDIX.md.

To add anything else:

- A part is an entry of `parts.PARTS` and a line in `__main__`'s docstring. For `report` to compare
  it, it also needs an entry of `contrasts.CONTRASTS`; for `summary` to print its levels, one of
  `summary.SETTING_LABELS` (the tables of all tasks, and the figure) or a row of
  `summary.recipes_of_other_parts` (MMLU). If its runs read a file that prefetch does not bring,
  `training.prepare` makes it, and `parts.sweep_overrides` puts its path into the runs' settings.
- A task is an entry of `score.tasks` in config.yaml and, for `report` to compare it, of
  `contrasts.CALIBRATION`. One that is answered by letters also needs a name in
  `answers.LETTER_TASKS`, by which it has a table and a column of panels.
- A metric is an entry of `contrasts.GUARDS` for its differences. For its levels it stands in
  `summary.METRICS`, `summary.COLUMNS` and `summary.cells_of_row`.
- A step is an entry of `__main__.STEPS` and a line in its docstring.
- A derivation: `derived.py` says how.
- A field of the records is a field of `records.RunRecord` and a column of `records.RUN_SCHEMA`. The
  published files must be rewritten with that column, which no command does.
"""
