"""The loss inside other training programs: a module for each, which imports that program.

`axolotl` is a plugin, `automodel` and `torchtitan` are loss classes. Nothing here is imported by
the rest of the package.
"""
