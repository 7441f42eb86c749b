"""Tools that run outside the agent's sandbox: a browser, a search engine, MCP servers, model endpoints.

contract           OutsideTool, Provider (lives as long as the program), ToolSession (lives as long as a rollout)
calls              the calls of one rollout: sessions opened at first use, time limits, kinds of error, bounded retries
config             the settings in TOML; imports nothing heavy
providers          from the settings to providers and their tools
jail               bubblewrap for programs that serve tools: Chromium, MCP servers
browser            the tools `browser_…`: Playwright on Chromium
browser_process    one Chromium in its jail, without network
page_proxy         the jail's only way out: pages of the world, and an allow-list
forwarder          the program inside the jail that forwards connections to the proxy
search             the tools `search` and `search_read`: a corpus, or an endpoint whose responses are recorded
corpus             documents, searched by BM25
search_recordings  responses of a search endpoint, stored by content hash
mcp                the tools of any MCP server
endpoints          the tools `ask_image` and `transcribe_audio`, by OpenAI-compatible endpoints
"""
