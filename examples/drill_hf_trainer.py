"""A Hugging Face Trainer script on a tiny model and local data, resumed as its documentation says.

Drill it as it is (`pip install transformers accelerate`):

    samerun drill --on "saved step 4$" --on "saved step 12" -- python examples/drill_hf_trainer.py "{out}"

docs/drills.md shows what the drill finds.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--steps", type=int, default=16)
options = parser.parse_args()

torch.set_num_threads(1)
set_seed(7)


class Bytes(Dataset):
    """Windows over this very file."""

    def __init__(self, length: int = 32) -> None:
        with open(__file__, "rb") as source:  # noqa: PTH123
            self.tokens = torch.tensor(list(source.read()))
        self.length = length

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * 16 : index * 16 + self.length]
        return {"input_ids": piece, "labels": piece}


class Progress(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        print(f"saved step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}", flush=True)


config = GPT2Config(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments(
    output_dir=options.out,
    max_steps=options.steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    save_steps=4,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    seed=7,
)
trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Bytes(), callbacks=[Progress()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(options.out))
