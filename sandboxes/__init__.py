"""Where untrusted code and tools run. Imports nothing else of ours, so that it can ship alone into a pod.

limits     what a sandbox may use
protocol   the contract: Backend, Sandbox, ToolResult, the errors
pool       warm sandboxes, leased one owner at a time
workbench  what a rollout uses: tools + world + perturbations + a lazily leased sandbox
seccomp    the filter of system calls, as BPF
backends/  open_backend by name; bubblewrap and gvisor (enclosed: what they share; runner: the program inside), scripted
libraries  where the Python packages of the tools are installed (libraries.in, libraries.lock)
tools/     one file a tool or family; tool (@tool), shipping, schema, registry (toolset)
outside/   tools that work outside the sandbox: browser, search, MCP servers, model endpoints
worlds/    world (data and its set-up), perturbations (pure)
"""
