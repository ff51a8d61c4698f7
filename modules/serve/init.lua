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
--     melange          which GPUs serve requests of many sizes as cheaply as can be
--     packing          pieces into machines of several kinds, as cheaply as can be
return require "tycho.lazy" ({}, {
  adapter_trials = "tycho.serve.adapter_trials",
  adapters = { "tycho.serve.adapters", "new" },
  engine = { "tycho.serve.engine", "new" },
  http = { "tycho.serve.http", "new" },
  melange = "tycho.serve.melange",
  packing = "tycho.serve.packing",
  replay = "tycho.serve.replay",
  traces = "tycho.serve.traces",
}, "tycho.serve")
