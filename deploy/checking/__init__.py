"""Tries a job before anything is started: `replayground check`, and the beginning of every `replayground run`.

report   what was tried and what is wrong
places   which file and line a mistake stands at
job      config, module, agents and tasks
trial    one task in a sandbox: world, tools, teacher, agents; and the scorers on what came of it

The job's module runs in this process: it is the operator's own code, which every program of the run imports too, and only
here does a mistake keep its traceback, and so its line. What a tool or an agent's code does runs in a sandbox, as in a run.
"""
