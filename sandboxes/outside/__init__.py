"""Tools whose work happens outside the agent's sandbox: a browser, a search engine, MCP servers, model endpoints.

contract   what such a tool is: OutsideTool, Provider (lives as long as the program), Session (as long as a rollout)
calls      the calls of one rollout: sessions opened at the first use, time limits, classed errors, bounded retries
config     what a TOML file may say of them; imports nothing heavy
providers  from the config to providers, and from the names of a toolset to tools
jail       bubblewrap for programs that serve tools: Chromium, MCP servers
browser    the tools `browser_…`: Playwright on Chromium; browser_process: its jail, without network
page_proxy the jail's only way out: pages of the world, and an allow-list
forwarder  the program inside the jail that carries connections to the proxy
search     the tools `search` and `search_read`: a corpus, or an endpoint whose answers are recorded
corpus     documents, found by BM25
recordings answers of an endpoint, kept by content hash
mcp        the tools of any MCP server
endpoints  the tools `ask_image` and `transcribe_audio`, by OpenAI-compatible endpoints
"""
