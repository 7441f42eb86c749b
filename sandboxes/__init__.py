"""Where untrusted code and tools run. Imports nothing else of ours, so that it can ship alone into a pod.

limits     what a sandbox may use
protocol   the contract: Backend, Sandbox, ToolResult, the errors
pool       warm sandboxes, leased one owner at a time
workbench  what a rollout uses: tools + world + perturbations + a lazily leased sandbox
seccomp    the filter of system calls, as BPF
backends/  bubblewrap (with runner, the program inside), scripted
tools/     one file a tool; tool (@tool), schema, registry (toolset)
worlds/    world (data and its set-up), perturbations (pure)
"""
