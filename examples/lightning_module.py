"""Lightning: compile the model inside of the LightningModule, whose own ``log`` torch cannot compile."""

import lightning
import torch
from small import device, llama, rows

from fx_fusion.lightning import Watch


class Causal(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.compile(llama(), backend="fx_fusion")

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


watching = Watch()
trainer = lightning.Trainer(
    max_steps=4, log_every_n_steps=2, callbacks=[watching], default_root_dir="out", logger=False,
    enable_progress_bar=False, enable_checkpointing=False, accelerator="gpu" if device == "cuda" else "cpu", devices=1,
)  # fmt: skip
trainer.fit(Causal(), torch.utils.data.DataLoader(rows(16), batch_size=4))
print(watching.report)
