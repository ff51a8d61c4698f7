--- Serving language models: require "tycho.serve".
--
--     local serve = require "tycho.serve"
--     local engine = serve.engine(model, { requests = 32 })
--     local request = engine:submit(tokens, { count = 100 })
--     engine:run()                    -- request.tokens
--
--     engine              many requests at once to one model
--     nano_batches        steps of tensor parallel ranks in parts, one computed while the sum of another is on its way
--     nano_trial          what these are measured by
--     split               machines for prompts and machines for tokens, as ranks, and keys and values between them
--     split_trial         what their comparison with others needs
--     traces              when requests come and how long they are, as two services had them
--     step_time           seconds of a step by what is in it, fitted to an engine or published
--     cluster             a cluster of such machines in events, and what its users see
--     designs             how many requests a second clusters of a price or a power serve well
return require "tycho.lazy" ({}, {
  cluster = "tycho.serve.cluster",
  designs = "tycho.serve.designs",
  engine = { "tycho.serve.engine", "new" },
  nano_batches = "tycho.serve.nano_batches",
  nano_trial = "tycho.serve.nano_trial",
  split = "tycho.serve.split",
  split_trial = "tycho.serve.split_trial",
  step_time = "tycho.serve.step_time",
  traces = "tycho.serve.traces",
}, "tycho.serve")
