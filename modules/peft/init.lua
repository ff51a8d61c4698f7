--- Fine-tuning with few parameters: require "tycho.peft".
--
--     local peft = require "tycho.peft"
--     peft.lora(model, { rank = 8, alpha = 16, targets = { "q_proj", "v_proj" } })
--     local opt = optim.AdamW(peft.parameters(model), { lr = 1e-4 })
--     ...
--     peft.save(model, "adapter")                    -- what the Python library peft reads, and peft.load
--     print(peft.merge(model))                       -- into the weights; what changed and what rounding took
--     peft.remove(model)                             -- a plain model again, with the merged weights
--     model:save "merged"
--
-- peft.loha, peft.lokr and peft.ia3 are adapters of other kinds, for the same functions, peft.prompt and peft.prefix
-- trained vectors in front of the text; peft.rows gives each row of a batch an adapter of its own. peft.qlora makes the
-- frozen weights 4-bit codes as well, peft.footprint says what training will take, peft.account what it would take for
-- any configuration. peft.eora makes adapters without training, which give a compressed model back what it lost.
-- peft.token_classification puts a head for tagging words on an encoder.
-- peft.mend trains networks that edit a model by the gradient of one example; peft.beliefs measures such ways.
-- peft.lamda trains small square matrices between fixed directions of the weights, peft.loram trains on a pruned model
-- what the whole one is to have, peft.mixlora mixes experts behind a router, peft.slimfit trains all weights, a few in
-- each step, and packs what the backward pass needs; peft.saved measures that, peft.packed packs it. peft.ce_ssl
-- switches updates off at random and learns from unlabelled signals beside labelled ones. peft.compare compares such
-- ways at equal budget.
--
-- Works on every module with Linear, Conv2d or Embedding layers, and on all families of tycho.llm. Hu et al. 2021,
-- "LoRA: Low-Rank Adaptation of Large Language Models".
local adapter = require "tycho.peft.adapter"
local files = require "tycho.peft.files"
local merging = require "tycho.peft.merging"
local prompts = require "tycho.peft.prompts"
local qlora = require "tycho.peft.qlora"

return require "tycho.lazy" ({
  lora = adapter.lora,
  loha = adapter.loha,
  lokr = adapter.lokr,
  ia3 = adapter.ia3,
  prompt = prompts.prompt,
  prefix = prompts.prefix,
  rows = require("tycho.peft.rows").new,
  qlora = qlora.qlora,
  footprint = qlora.footprint,
  account = qlora.account,
  parameters = adapter.parameters,
  disable = adapter.disable,
  remove = adapter.remove,
  merge = merging.merge,
  unmerge = merging.unmerge,
  save = files.save,
  load = files.load,
  read = files.read,
  eora = require "tycho.peft.eora",
  lamda = require "tycho.peft.lamda",
  loram = require "tycho.peft.loram",
  mixlora = require "tycho.peft.mixlora",
  slimfit = require "tycho.peft.slimfit",
  ce_ssl = require "tycho.peft.ce_ssl",
  saved = require "tycho.peft.saved",
  packed = require "tycho.peft.packed",
  audit = require "tycho.peft.audit",
  compare = require "tycho.peft.compare",
  token_classification = require "tycho.peft.token_classification",
  mend = require "tycho.peft.mend",
  beliefs = require "tycho.peft.beliefs",
}, {}, "tycho.peft")
