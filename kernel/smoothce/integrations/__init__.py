"""The loss inside other training programs: a module for each, which imports that program.

`axolotl` is a plugin, which hands the made trainer to `patch_trainer`; `automodel` is a loss class
that is given hidden states and the head's weight; `torchtitan` one that runs the head itself.
Nothing here is imported by the rest of the package.

Most programs need no module. `smoothce.hf_patch` serves Hugging Face's Trainer and TRL's, and by
its callback whatever hands callbacks to a Trainer, as LLaMA-Factory and ms-swift do. Lightning
calls `patch_model`, and open-instruct is served by patches/.

A program that takes neither a callback nor a patched model gets a module here. In any case it gets
a row of the README's table of trainers, and a test beside those in tests/kernel/integrations, whose
env.sh pins its version. Such a module

1. is handed what the program has: the made trainer, which goes to `patch_trainer`; hidden states
   and the head's weight; or the head itself, which `patch_head` makes compute the loss;
2. divides a *sum* by the number of the update's labels on all ranks, where the program counts
   them;
3. leaves out smoothing and z-loss in evaluation, which is where gradients are off;
4. refuses what would train the program's own loss instead. Where all of Hugging Face's Trainers
   may have it, that belongs in `hf_patch.trainer`;
5. takes the options of the loss that fit;
6. takes a model's scale and cap from the user where `patch_trainer` is not what runs: `automodel`
   and `torchtitan` do not see what the model does to its logits.
"""
