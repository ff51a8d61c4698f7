-- Which module may require which, and why: what tests/lua/arrows_test.lua holds the sources to. A new arrow is a row
-- here, with its reason; one that nobody uses any more is taken out.
return {
  -- Data requires nothing but the library.
  datasets = {},

  -- Nor do probability distributions, nor what foretells costs.
  distributions = {},
  estimate = {},

  -- Nor do methods of the sciences.
  science = {},

  -- Networks require nothing but the library: no technique, no method, no reader of files.
  models = {},

  -- Reading and writing what the world ships.
  hub = {
    models = "the class that a config.json asks for",
  },

  -- What one does with models of a domain.
  llm = {
    models = "networks under the module's names, the interface of caches",
    hub = "llm.load and its like are the hub's",
  },
  diffusion = {
    models = "networks under the module's names",
    peft = "LoRA files of pipelines are adapters of peft",
  },
  vision = {
    models = "networks under the module's names",
  },

  serve = {
    llm = "caches in pages, how tokens are chosen and what ends a text",
    hub = "the command loads a model, its tokenizer and its template of chats",
    zoo = "models that ship are served by name",
    peft = "the adapters' files",
    dist = "machines for prompts and machines for tokens are ranks",
    models = "layers whose halves nano-batches go through in turn",
  },

  dist = {
    models = "the Llama of its workload, and networks in parts",
  },

  distill = {
    diffusion = "teachers make trajectories with its samplers; students learn its processes",
    vision = "the judge of drawn digits is one of its classifiers",
    models = "the digits' smaller network",
    zoo = "painters of the zoo as bases, judged by its yardstick",
  },

  vlm = {
    models = "networks under the module's names",
    hub = "vlm.load reads a folder: network, tokenizer, template of chats, processor",
    llm = "generation of text about pictures",
    vision = "average precision, by which retrieval is scored",
    peft = "low-rank adapters of the language model, where a projector alone is too little",
  },

  -- The small models that ship.
  zoo = {
    hub = "a model of the zoo is a folder as any published one",
    llm = "how the zoo's language models are trained",
    datasets = "models of scenes are trained on them",
    models = "the text encoder of a CLIP as a network of its own; the networks that are trained where they are wanted",
    diffusion = "how networks that draw are trained, and drawing",
    vision = "judges of scenes are measured by its figures",
    vlm = "how well a drawn picture fits its caption; features of scenes, some at a time",
  },

  -- Which data to learn from: functions of features and scores.
  curation = {},

  -- Training without a gradient from end to end, of any layers.
  ["local"] = {
    datasets = "what its ways are compared on",
  },

  -- Techniques, on any model: layers are found and changed by nn.surgery.
  offload = {},
  tiny = {},
  quant = {
    hub = "quant.convert and quant.save write GGUF files",
  },
  peft = {
    quant = "QLoRA trains on weights of few bits; EoRA makes up for what they lost, by the same calibration",
    models = "a prefix is a cache with keys and values that are trained",
  },
  prune = {
    quant = "SparseGPT solves as GPTQ does, by the same calibration; second moments of layers' inputs",
    hub = "a model whose layers have sizes of their own is a folder that hub reads and assigns",
    models = "the class of such a folder, and attention over heads of other widths",
    vision = "vision transformers that were pruned are trained with a teacher",
  },
}
