"""The forward graph of a Wide-ResNet.

    x = max_pool(relu(norm(stem(images))))
    layer:  x = relu(norm3(conv3(relu(norm2(conv2(relu(norm1(conv1(x)))))))) + shortcut(x))
    head:   logits = head(mean of x over the image);  loss = mean(nll(log_softmax(float(logits))))

The shortcut is x. If the shape changes, it is a convolution of x with a norm. A norm takes mean and
variance of all data ranks' images, in fp32: ``average`` averages three values per channel over data
ranks. Tensors are [batch, channels, height, width]; the dims of a resolution carry its number.
``nn/wide_resnet.py`` is the same mathematics as a torch module.
"""

from meshwise.models.families.build import Build, Layers
from meshwise.models.graph import Graph
from meshwise.spec.vision import EXPANSION, WideResNet


def forward(
    model: WideResNet, batch: int, dtype: str, layers: Layers, *, first: bool, last: bool
) -> Graph:
    """Return the forward graph of a Wide-ResNet (``families.forward``). A kind sets its dims."""
    build = Build(dtype)
    x = _stem(build) if first else build.tensor("stage.in", _into(layers[0].form))
    for i, kind in enumerate(layers):
        build.part, build.layer = "layer", i
        if x == "stage.in":  # it is received channels first
            x = build.elementwise("layers.0.in", "copy", x)
        x = _bottleneck(build, x, f"layers.{i}", kind.form)
    if last:
        _head(build, x, f"features.{len(model.blocks) - 1}")
    return build.graph(_sizes(model, batch))


def _sizes(model: WideResNet, batch: int) -> dict[str, int]:
    half = -(-model.image_size // 2)  # a stride of 2 rounds up: all kernels are padded
    sizes = {
        "batch": batch, "seq": 1, "colors": 3, "channels": model.channels, "one": 1, "two": 2,
        "three": 3, "classes": model.num_classes, "height": model.image_size,
        "width": model.image_size, "height.stem": half, "width.stem": half,
        **{f"kernel.{side}{k}": k for side in ("height", "width") for k in (1, 3, 7)},
    }  # fmt: skip
    for resolution in range(len(model.blocks)):
        half, filters = -(-half // 2), model.channels * 2**resolution
        of = {"height": half, "width": half, "filters": filters, "features": EXPANSION * filters}
        of["inner"] = model.width_factor * filters
        sizes |= {f"{name}.{resolution}": size for name, size in of.items()}
    return sizes


def _image(channels: str, resolution: int | str) -> tuple[str, ...]:
    return "batch", channels, f"height.{resolution}", f"width.{resolution}"


def _into(kind: str) -> tuple[str, ...]:
    """Return the dims of the input of a layer of this ``kind``."""
    resolution, where = int(kind[0]), kind[2:]
    if where == "rest":
        return _image(f"features.{resolution}", resolution)
    return (
        _image(f"features.{resolution - 1}", resolution - 1)
        if resolution
        else _image("channels", 0)
    )


def _stem(build: Build) -> str:
    dims = ("batch", "colors", "height", "width")
    images = build.tensor("images", dims, role="index")
    x = build.tensor("images.y", dims, role="constant")
    x = build.node("images", "copy", (images,), x)  # channels last
    x = _convolution(build, x, "stem", _image("channels", "stem"), 7)
    x = build.elementwise("stem_relu", "relu", _norm(build, x, "stem_norm"))
    y = build.tensor("pool.y", _image("channels", 0))
    picked = build.tensor("pool.picked", _image("channels", 0), "int64")
    return build.node("pool", "max_pool", (x,), y, picked)


def _bottleneck(build: Build, x: str, at: str, kind: str) -> str:
    i = int(kind[0])
    wide = _into(kind)
    y = _convolution(build, x, f"{at}.conv1", ("batch", f"filters.{i}", *wide[2:]), 1)
    y = _norm(build, y, f"{at}.norm1", cheap=True)
    y = build.elementwise(f"{at}.relu1", "relu", y, cheap=True)
    with build.within("convolutions"):
        y = _convolution(build, y, f"{at}.conv2", _image(f"inner.{i}", i), 3)
        y = _norm(build, y, f"{at}.norm2", cheap=True)
        y = build.elementwise(f"{at}.relu2", "relu", y, cheap=True)
        y = _convolution(build, y, f"{at}.conv3", _image(f"features.{i}", i), 1)
    y = _norm(build, y, f"{at}.norm3")
    if kind.endswith("first"):
        x = _convolution(build, x, f"{at}.shortcut", _image(f"features.{i}", i), 1)
        x = _norm(build, x, f"{at}.shortcut_norm")
    return build.elementwise(f"{at}.relu", "relu", build.elementwise(f"{at}.add", "add", x, y))


def _convolution(build: Build, x: str, name: str, out: tuple[str, ...], kernel: int) -> str:
    """Append a convolution with a square kernel. Its stride follows from the extents of x and the
    result."""
    square = (f"kernel.height{kernel}", f"kernel.width{kernel}")
    weight = build.parameter(f"{name}.weight", out[1], build.tensors[x].dims[1], *square)
    return build.node(name, "convolution", (x, weight), build.tensor(f"{name}.y", out))


def _norm(build: Build, x: str, name: str, *, cheap: bool = False) -> str:
    """Append (x - mean) / sqrt(variance + epsilon) * weight + bias, as x * scale + shift.
    ``cheap``: selective recomputation normalises again, with the same statistics."""
    dims, c = build.tensors[x].dims, build.tensors[x].dims[1]

    def small(of: str, kind: str, *inputs: str, cheap: bool = False) -> str:
        """Append a node whose result is one number per channel."""
        y = build.tensor(f"{name}.{of}", (c,), "fp32")
        return build.node(f"{name}.{of}", kind, inputs, y, cheap=cheap)

    def stack(of: str, count: str, *inputs: str) -> str:
        y = build.tensor(f"{name}.{of}", (count, c), "fp32")
        return build.node(f"{name}.{of}", "concat", inputs, y)

    def unbind(stacked: str, *parts: str) -> list[str]:
        views = [build.tensor(f"{stacked}.{part}", (c,), "fp32") for part in parts]
        build.node(f"{stacked}.unbind", "view", (stacked,), *views)
        return views

    wide = (
        x if build.dtype == "fp32" else build.elementwise(f"{name}.wide", "cast", x, dtype="fp32")
    )
    variance, mean = (build.tensor(f"{name}.{of}", (c,), "fp32") for of in ("variance", "mean"))
    build.node(f"{name}.var_mean", "var_mean", (wide,), variance, mean)
    three = stack("stack", "three", mean, variance, small("square", "square", mean))
    averaged = build.tensor(f"{name}.average", ("three", c), "fp32")
    build.node(f"{name}.average", "average", (three,), averaged)
    mean, variance, squared = unbind(averaged, "mean", "variance", "squared")
    between = small("between", "add", squared, small("square2", "square", mean))
    whole = small("clamp", "clamp", small("whole", "add", variance, between))
    statistics = stack("statistics", "two", mean, whole)

    mean, variance = unbind(statistics, "mean", "variance")
    weight, bias = (build.parameter(f"{name}.{part}", c) for part in ("weight", "bias"))
    root = small("rsqrt", "rsqrt", small("epsilon", "copy", variance, cheap=cheap), cheap=cheap)
    scale = small("scale", "mul", weight, root, cheap=cheap)
    shift = small(
        "shift", "add", bias, small("moved", "mul", mean, scale, cheap=cheap), cheap=cheap
    )
    y = build.tensor(f"{name}.scaled", dims, "fp32")
    y = build.node(f"{name}.scaled", "mul", (x, scale), y, cheap=cheap)
    y = build.elementwise(f"{name}.shifted", "add", y, shift, cheap=cheap)
    if build.dtype == "fp32":
        return y
    return build.elementwise(f"{name}.narrow", "cast", y, dtype=build.dtype, cheap=cheap)


def _head(build: Build, x: str, features: str) -> None:
    build.part, build.layer = "head", 0
    pooled = build.tensor("mean.y", ("batch", features))
    x = build.node("mean", "mean", (x,), pooled)
    weights = (
        build.parameter("head.weight", "classes", features),
        build.parameter("head.bias", "classes"),
    )
    logits = build.node("head", "gemm", (x, *weights), build.tensor("head.y", ("batch", "classes")))
    build.loss(logits)
