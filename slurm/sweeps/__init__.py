"""Sweeps of fine-tuning runs, on one machine or on Slurm.

A run's way: `runs.grid` reads a sweep file and expands its grid into runs, each with a folder.
`launch` starts what is not done: here (`launch.local`), or by job arrays (`launch.slurm`), of which
submitit starts each element (`launch.element`). There `launch.worker` brings the run through its
stages, each a program of its own, `python -m sweeps train RUN_DIR` or `score`. The first calls the
run's backend (`runs.backend`); for several processes, it becomes torchrun, and each rank runs
`train` again. `training` makes the weights, `runs.scoring` the records; `results` tells what became
of the runs and makes the tables.

The words of all of it:

sweep      a sweep file with its overrides, and the folder of its runs
run        one training, and the scoring of what it makes; a baseline, which `status` calls a base
           model, is a run without training: a model before fine-tuning, that is scored as it is
stage      training or scoring; a run is trained when its model is there, and done once nothing that
           was asked for is left to do (the file DONE says that it once was)
attempt    one program, started for one stage; what happened to it are events
job        one call of sbatch, named by its id, 12; its folder below `jobs` is named by its tag
element    what works on one run in a job that is an array, named by its label, 12_3; to Slurm it is
           a job of its own, which is "this job" in `launch.element`
worker     what calls `launch.worker.work`: an element, or a thread of a launch without Slurm
launched   a launch has asked for the run; on Slurm it is then queued, as squeue lists it
stopped    a run has saved and left because somebody asked, by a signal or a stop file
settings   all that decides a run, or the figures of a record file; `grid_values` are those settings
           of a run that vary in its sweep file

`runs` is used by the three others and imports none of them: a backend is found by its name
(`runs.backend_modules`). `training` and `launch` do not import each other; `cli`, which parses
commands, is imported by none of them.
"""

__version__ = "0.1.0"
