"""Where untrusted code and tools run. Imports no other package of this project, so that it can be shipped alone.

limits     resource limits of a sandbox
protocol   the contract: Backend, Sandbox, ToolResult, the errors
pool       warm sandboxes, each leased to one owner at a time
workbench  what a rollout uses: tools, world, perturbations, and sandboxes that are leased at the first call
seccomp    the system call filter, as BPF
machine    checks of this machine that backends and jails share
backends/  open_backend by name; bubblewrap and gvisor (enclosed: what they share; runner: the program inside), scripted
libraries  where the Python packages of the tools are installed (libraries.in, libraries.lock)
tools/     one file for each tool or family; tool (@tool), shipping, schema, registry (toolset)
outside/   tools that run outside the sandbox: browser, search, MCP servers, model endpoints
worlds/    world (data and its set-up), perturbations (pure)
"""
