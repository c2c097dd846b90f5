def reset(modules):
    from torch.distributed.fsdp import FSDPModule
    for m in modules:
        if isinstance(m, FSDPModule):
            m.reset_iter_state()
