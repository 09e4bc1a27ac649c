"""Messages, batches and datasets on the feed's connections, and the keys that protect them.

| question | module | what it answers |
| --- | --- | --- |
| What is said? | `protocol` | a table of all messages |
| Who may connect? | `crypto` | keys of a run; before that nothing is parsed |
| | `sealing` | encryption of batches |
| How is a batch sent? | `codec` | its tree and its payload |
| | `aliases` | tensors that share memory |
| | `blocks` | tensors cut from one block of memory |
| | `stream` | the transfer, into memory that is used again |
| What is sent of a dataset? | `dataset` | dataset, collate function and settings: the spec |
| | `pickling` | the pickle, the same in every rank |
| | `definitions` | what the script defines beyond it |
| | `script_module` | the script as a module, where it never runs |
| | `import_path` | where the script imports from |
| | `imported_code` | is the code that is imported the same on both hosts? |
| | `shared_generators` | generators that a dataset shares with a module |
| | `reopened`, `mapped_files` | open files, locks and maps, made again |
| | `shared_memory` | objects that cannot travel, as processes share them |
| | `rebuilding` | why a pickle cannot be rebuilt |
| | `host_errors` | what an error says of the host that raised it |
| | `in_child` | the user's code, run in a child as it may end its process |
| What would a fork inherit? | `process_settings` | settings of the script's process, sent along |
| | `python_settings`, `torch_settings`, `library_settings` | their tables |
| | `module_values` | values that the script sets in modules |
| | `inherited` | the form of one setting |
| | `import_hooks` | a setting of a library that is not imported yet |
| | `process_group` | the process group of torch.distributed |
"""
