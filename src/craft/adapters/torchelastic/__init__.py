"""torchrun: what its elastic agent says of its workers, told to the lighthouse of the job that they belong to.

Workers of a torchrun need nothing of this: ``craft.join()`` finds its lighthouse (``worker/entry/torchrun_attach.py``).
This is the other side: ``python -m craft.adapters.torchelastic`` is torchrun with an event handler named ``craft``.
"""
