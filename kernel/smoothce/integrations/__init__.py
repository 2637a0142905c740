"""The loss inside other training programs: a module for each, which imports that program.

`axolotl` is a plugin, which hands the made trainer to `patch_trainer`; `automodel` is a loss class
that is given hidden states and the head's weight; `torchtitan` one that runs the head itself.
Nothing here is imported by the rest of the package.

Hugging Face's Trainer and TRL's are served by `smoothce.hf_patch`, OLMo-core by the README's
function, open-instruct by patches/. Another program gets a module here, a row of the README's table
of trainers, and a test beside those in tests/kernel/integrations, whose env.sh pins its version.
"""
