import torch
from accelerate import PartialState

state = PartialState(cpu=True)
if state.is_main_process:
    print("processes:", state.num_processes)
shard = torch.arange(10)[state.process_index :: state.num_processes]
state.wait_for_everyone()
state.destroy_process_group()
