"""torchrun: report events of its elastic agent to the lighthouse of the job.

Workers of a torchrun do not need it: ``craft.join()`` finds its lighthouse (``worker/entry/torchrun_attach.py``).
``python -m craft.adapters.torchelastic`` is torchrun with an event handler named ``craft``.
"""
