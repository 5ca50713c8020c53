import pytest
import torch
from arguments import BadInput
from image_models import (
    AUXILIARY_WEIGHT,
    build_model,
    choose_image_size,
    model_names,
    training_loss,
    why_refused,
)
from torch.nn.functional import cross_entropy


def test_resnet20_is_the_published_size():
    model = build_model("resnet20", 10)
    assert sum(p.numel() for p in model.parameters()) == 269_722
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("resnet20", 32), ("vgg16-cifar", 32), ("resnet50", 32), ("vgg16", 32), ("alexnet", 64)),
        ("googlenet", 32),
    ],
)
def test_published_models_train_on_small_images(name, size):
    model = build_model(name, 10)
    assert choose_image_size(model, batch_size=16) == size
    assert why_refused(model, 16, size) == ""


def test_vgg16_for_small_images_is_the_published_size():
    assert sum(p.numel() for p in build_model("vgg16-cifar", 10).parameters()) == 14_728_266


def test_choosing_an_image_size_changes_nothing():
    model = build_model("resnet20", 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    choose_image_size(model, batch_size=4)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_made_for_one_size_gets_it():
    assert choose_image_size(build_model("vit_b_32", 10), batch_size=2) == 224


def test_an_impossible_image_size_is_told_with_its_reason():
    model = build_model("vit_b_32", 10)
    with pytest.raises(BadInput, match=r"32x32 .*Expected 224.*--image-size") as caught:
        choose_image_size(model, 2, (32,))
    assert "\n" not in str(caught.value)


def test_one_image_is_too_few_for_batch_norm_at_one_pixel():
    assert "more than 1 value per channel" in why_refused(build_model("resnet18", 10), 1, 32)


def test_an_unknown_model_is_told_its_neighbours():
    with pytest.raises(BadInput, match=r"'resnet51'.*resnet50"):
        build_model("resnet51", 10)
    with pytest.raises(BadInput, match=r"'zzz'.*resnet50"):
        build_model("zzz", 10)


def test_every_classifier_of_torchvision_is_offered():
    assert {"alexnet", "googlenet", "inception_v3", "regnet_y_400mf", "vgg16"} < set(model_names())


def test_auxiliary_classifiers_count_in_the_loss_but_not_in_the_hits():
    labels = torch.tensor([1, 0])
    logits, auxiliary = torch.eye(2), torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    loss, judged = training_loss((logits, auxiliary), labels)
    expected = cross_entropy(logits, labels) + AUXILIARY_WEIGHT * cross_entropy(auxiliary, labels)
    assert torch.allclose(loss, expected)
    assert judged is logits
    assert torch.equal(training_loss(logits, labels)[0], cross_entropy(logits, labels))


def test_every_parameter_of_a_model_with_auxiliary_outputs_gets_a_gradient():
    model = build_model("googlenet", 10).train()
    loss, _ = training_loss(model(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1]))
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
