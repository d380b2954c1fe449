"""Every setting of training, with its default; other configs change some."""

from typing import Any

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
  """Returns the settings; a name that is not among them is refused."""
  config: Any = ml_collections.ConfigDict()
  config.seed = 0

  config.model = ml_collections.ConfigDict()
  config.model.preset = "tiny"  # random weights; see modeling/presets.py
  config.model.checkpoint = ""  # a Hugging Face directory, instead of a preset
  config.model.dtype = config_dict.placeholder(str)  # default: the preset's
  config.model.param_dtype = config_dict.placeholder(str)
  config.model.initializer_range = config_dict.placeholder(float)
  config.model.latent_norm_eps = config_dict.placeholder(float)  # GLM-5 alone

  config.lora = ml_collections.ConfigDict()
  config.lora.rank = 0  # 0 trains every weight
  config.lora.alpha = 16.0
  # Names of linear layers, as "('q_b_proj', 'experts')"; () is those that the
  # model adapts by default, see ADAPTED_NAMES of its config.
  config.lora.targets = ()

  config.data = ml_collections.ConfigDict()
  config.data.rollouts = ""  # a JSONL file of groups, instead of sampling
  config.data.prompt_tokens = 4096  # of the text task
  config.data.max_prompt_tokens = 1 << 21  # longest prompt in the file
  config.data.max_response_tokens = 1 << 15

  config.sampling = ml_collections.ConfigDict()
  config.sampling.max_tokens = 128
  config.sampling.temperature = 1.0  # also that of the scores
  config.sampling.top_p = 1.0
  config.sampling.stop_tokens = ()
  # What the sampler chose and replay is to choose again: "experts", and
  # "selections" of tokens, of which a token takes 2.4 KB and 172 KB in GLM-5.2.
  config.sampling.record = ()

  config.objective = ml_collections.ConfigDict()
  config.objective.clip_eps_low = 0.2
  config.objective.clip_eps_high = 0.28
  config.objective.kl_coef = 0.0
  config.objective.kl_estimator = "k3"
  config.objective.aggregation = "response_mean"

  config.optimizer = ml_collections.ConfigDict()
  config.optimizer.learning_rate = 1e-5
  config.optimizer.warmup_steps = 0
  config.optimizer.beta1 = 0.9
  config.optimizer.beta2 = 0.95
  config.optimizer.eps = 1e-8
  config.optimizer.weight_decay = 0.0
  config.optimizer.max_grad_norm = 1.0
  config.optimizer.memory_kind = "device"  # or "pinned_host": its moments there

  config.train = ml_collections.ConfigDict()
  config.train.steps = 100
  config.train.prompts_per_step = 1
  config.train.group_size = 8  # of sampling; a file's groups have their own
  # "dropped" leaves out what reaches the weights through the prompt's state;
  # "exact" is the gradient of whole sequences.
  config.train.prompt_gradient = "dropped"
  config.train.cotangent_dtype = "float32"  # "bfloat16" halves that of slots
  config.train.normalize_std = True
  config.train.old_log_probs = "policy"  # or "rollouts": those in the file
  config.train.capture_chunk_tokens = 2048
  config.train.replay_block_tokens = 2048
  config.train.head_chunk_tokens = 256
  config.train.response_multiple = 128

  config.capture = ml_collections.ConfigDict()  # what "exact" keeps of a prompt
  config.capture.boundary_every = 1  # recurrent state of every n-th chunk
  config.capture.memory_kind = "device"  # or "pinned_host": those states there

  config.refresh = ml_collections.ConfigDict()  # when to capture a prompt again
  config.refresh.rule = "every_step"  # or "every_n" or "adaptive"
  config.refresh.every_n = 8  # steps that a kept state serves at most
  config.refresh.limit_nats = 0.05  # "adaptive": its estimated drift at most
  config.refresh.witness_tokens = 2048  # of a prompt's end, for the estimate
  config.refresh.keep_prompts = 1  # states kept, for each replica

  config.checkpoint = ml_collections.ConfigDict()
  config.checkpoint.every_steps = 10
  config.checkpoint.keep = 2
  config.checkpoint.export = False  # write a Hugging Face model at the end

  config.mesh = ml_collections.ConfigDict()
  config.mesh.data = _size(1)  # replicas: prompts captured side by side
  config.mesh.context = _size(1)  # devices that share the tokens of a prompt
  config.mesh.tensor = _size(1)  # devices that share the heads of a layer

  config.state = ml_collections.ConfigDict()
  config.state.memory_kind = "device"  # or "pinned_host": prompts' slots there

  config.memory = ml_collections.ConfigDict()
  config.memory.device_bytes = 0  # of a device; 0 asks it, if it can tell

  config.distributed = ml_collections.ConfigDict()
  config.distributed.coordinator = ""  # HOST:PORT of process 0
  config.distributed.num_processes = 0
  config.distributed.process_id = -1
  config.distributed.auto = False  # ask the cluster: SLURM, GKE, a TPU pod
  config.distributed.timeout_s = 300  # of a process that does not answer
  config.distributed.stall_timeout_s = 3600  # of one that makes no progress
  return config.lock()


def _size(default: int) -> config_dict.FieldReference:
  """Returns the size of a mesh axis: a number, or "auto" for what is left."""
  return config_dict.FieldReference(default, field_type=object)
