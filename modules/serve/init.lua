--- Serving language models: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local engine = serve.engine(model, { tokenizer = tokenizer })
--     serve.adapters(engine):add("french", "adapters/french")
--     local request = engine:submit(tokens, { count = 100, adapter = "french" })
--     engine:run()                    -- request.tokens; or serve.http(engine):run()
--
--     engine           many requests at once to one model
--     adapters         low-rank adapters by the thousand on an engine
--     adapter_trials   other ways to serve them, to compare with
--     http             an engine behind the API of OpenAI
--     replay, traces   requests as they come, played by a clock that counts computing
--     services         when requests come and how long they are, as two services had them
--     nano_batches     steps of tensor parallel ranks in parts, one computed while the sum of another is on its way
--     nano_trial       what these are measured by
--     split            machines for prompts and machines for tokens, as ranks, and keys and values between them
--     split_trial      what their comparison with others needs
--     step_time        seconds of a step by what is in it, fitted to an engine or published
--     cluster          a cluster of such machines in events, and what its users see
--     designs          how many requests a second clusters of a price or a power serve well
--     melange          which GPUs serve requests of many sizes as cheaply as can be
--     packing          pieces into machines of several kinds, as cheaply as can be
return require "tycho.lazy" ({}, {
  adapter_trials = "tycho.serve.adapter_trials",
  adapters = { "tycho.serve.adapters", "new" },
  cluster = "tycho.serve.cluster",
  designs = "tycho.serve.designs",
  engine = { "tycho.serve.engine", "new" },
  http = { "tycho.serve.http", "new" },
  melange = "tycho.serve.melange",
  nano_batches = "tycho.serve.nano_batches",
  nano_trial = "tycho.serve.nano_trial",
  packing = "tycho.serve.packing",
  replay = "tycho.serve.replay",
  services = "tycho.serve.services",
  split = "tycho.serve.split",
  split_trial = "tycho.serve.split_trial",
  step_time = "tycho.serve.step_time",
  traces = "tycho.serve.traces",
}, "tycho.serve")
