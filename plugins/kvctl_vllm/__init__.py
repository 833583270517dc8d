"""kvctl inside an unmodified vLLM, through its public extension points: weights from any kvctl source
(`--load-format kvctl`), KV sessions in a repo (`KvctlConnector`), weights that change under a running engine and leave
it while it runs (`--worker-extension-cls`, and HTTP routes that a `VLLM_PLUGINS` entry opens). Imports the use cases of
`kvctl`; torch and vllm only in modules that vLLM loads. `kvctl help vllm` is the user's page.
"""
