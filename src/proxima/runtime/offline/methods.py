"""The method of each config."""

from typing import Any

from proxima.config.offline_schema import OfflineConfig, RewardModelConfig, SftConfig
from proxima.config.preference_schema import PreferenceConfig
from proxima.runtime.offline.method import OfflineMethod
from proxima.runtime.offline.preference_method import PreferenceMethod
from proxima.runtime.offline.reward_method import RewardMethod
from proxima.runtime.offline.sft_method import SftMethod

METHODS: dict[type[OfflineConfig], type[OfflineMethod[Any, Any]]] = {
    SftConfig: SftMethod,
    RewardModelConfig: RewardMethod,
    PreferenceConfig: PreferenceMethod,
}
