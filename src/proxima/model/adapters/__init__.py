"""Adapters: LoRA, through the library peft.

    lora           `Lora`, the settings; puts adapters on a model, switches them off and takes them off
    merged_lora    the layer of an adapter, which derives from peft's: imported when a model gets one
    adapter_files  reads and writes adapters, with the identity of the model that they were made for

Imports: peft when a model gets an adapter, `proxima.data`, `model`. Imported by `model`, `engine`,
`training`, `config`.
"""
