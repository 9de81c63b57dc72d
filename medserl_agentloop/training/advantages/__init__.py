"""Role-separated advantage estimators.

verl's own estimators let rewards cross the border between opposed roles: REINFORCE++ and GAE carry
a later reward back over masked tokens, GRPO and RLOO sum all rewards of a row. Here returns,
baselines and normalisation stay within a role. Called by the trainer; registered with verl so that
``algorithm.adv_estimator`` knows the names.
"""

from medserl_agentloop.training.advantages.batch import Advantages, BaselineState, RoleBatch
from medserl_agentloop.training.advantages.estimators import ROLE_ESTIMATORS, RoleEstimator

__all__ = ["ROLE_ESTIMATORS", "Advantages", "BaselineState", "RoleBatch", "RoleEstimator"]
