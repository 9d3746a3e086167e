"""The models of a process: found again in the same order, wherever they lie in memory."""

import torch
from torch import nn

from scaledot.watch import models


def test_models_come_in_the_order_of_the_optimizer():
    made = [nn.Linear(1, 1) for _ in range(6)]
    for order in (made, made[::-1], made[3:] + made[:3]):
        parameters = [parameter for model in order for parameter in model.parameters()]
        assert models.trained_by(torch.optim.SGD(parameters)) == order


def test_of_several_models_around_a_module_the_largest_counts():
    shared = nn.Linear(1, 1)
    small = nn.Sequential(shared)
    large = nn.Sequential(shared, nn.ReLU())
    assert models.around(shared) is large
    smallest = nn.Sequential(shared)
    assert models.around(shared) is large
    assert small != smallest


def test_a_module_that_is_in_no_other_is_its_own_model():
    alone = nn.Linear(1, 1)
    assert models.around(alone) is alone
