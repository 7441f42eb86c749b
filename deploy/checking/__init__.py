"""Checks a job before anything is started: `replayground check`, and the beginning of every `replayground run`.

report   collects and prints what was tried and which mistakes were found
places   finds the file and line of a mistake
job      checks config, module, agents and tasks
trial    plays tasks in a sandbox: world, tools, teacher, agents; then runs the scorers on the trajectories

The job's module runs in this process: it is the user's own code, every program of the run imports it too, and only here
an exception keeps its traceback and so its line. Tools and agents' code run in a sandbox, as in a run.
"""
