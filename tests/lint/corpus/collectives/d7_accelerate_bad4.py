import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
policy = torch.nn.Linear(12, 3)
opt = torch.optim.AdamW(policy.parameters(), lr=3e-4)
dl = DataLoader(TensorDataset(torch.randn(300, 12), torch.randint(0, 3, (300,))), batch_size=10, shuffle=True)
policy, opt, dl = accelerator.prepare(policy, opt, dl)

for obs, action in dl:
    actor = accelerator.unwrap_model(policy)
    logp = torch.log_softmax(actor(obs), dim=-1)
    loss = -logp.gather(1, action[:, None]).mean()
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
