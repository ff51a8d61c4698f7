-- Small tasks of text: what is asked and answered, splits that share no text, batches, scores.
local here = (arg and arg[0]:match ".*/" or "tests/modules/datasets/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local datasets, zoo = require "tycho.datasets", require "tycho.zoo"
require "tycho.llm" -- for generation

local tasks, nn = datasets.text_tasks, ty.nn

local function text_of(item) return item.prompt:match "^%u%l+: (.*)\nAnswer:$" end

-- The words of a text, sorted, without punctuation.
local function words(text)
  local list = {}
  for word in text:gmatch "%S+" do list[#list + 1] = word end
  table.sort(list)
  return list
end

check.test("each answer follows from its prompt", function()
  local set, books = datasets.load("text_tasks", { length = 500 }), {}
  for _, book in ipairs(tasks.books) do books[book] = true end
  for _, item in set:each() do
    local text, answer = text_of(item), item.answer:match "^ (.+)\n$"
    check.ok(text and answer, item.prompt .. item.answer)
    if item.task == "count" then
      check.equal(answer, tostring(select(2, text:gsub(";", "")) + 1))
    elseif item.task == "copy" then
      check.equal(text:match "%[(.-)%]", answer)
    elseif item.task == "book" then
      check.ok(books[answer], answer)
    elseif item.task == "order" then
      check.equal(words(text), words(answer))
    else
      check.equal(item.task, "missing")
      check.ok(text:find("[ ]", 1, true) and answer:find "^%S+$", item.prompt .. answer)
    end
  end
end)

check.test("what is asked for stands in the split's chapters, and but for repeated verses in no other's",
  function()
    local function text_of_split(split)
      local set, parts = datasets.load("kjv", { split = split == "training" and "training" or "held_out" }), {}
      for i, chapter in set:each() do
        if split == "training" or (i % 2 == 0) == (split == "test") then
          parts[#parts + 1] = (chapter.text:gsub("%p+%f[%s\0]", ""):gsub("%f[%S]%p+", ""):gsub("%s+", " "))
        end
      end
      return " " .. table.concat(parts, " ") .. " "
    end
    local texts = {}
    for split in pairs(tasks.sizes) do texts[split] = text_of_split(split) end
    for split in pairs(tasks.sizes) do
      local set = datasets.load("text_tasks", { split = split, tasks = { "missing" }, length = 60 })
      local elsewhere = 0
      for _, item in set:each() do
        local whole = text_of(item):gsub("%[ %]", (item.answer:match "^ (.+)\n$"))
        for other, text in pairs(texts) do
          local found = text:find(" " .. whole .. " ", 1, true) ~= nil
          if other == split then check.ok(found, split .. ": " .. whole)
          elseif found then elsewhere = elsewhere + 1 end
        end
      end
      check.ok(elsewhere <= 10, ("%s: %d of 60 texts are in other splits, too"):format(split, elsewhere))
    end
  end)

check.test("items depend on seed, split and position alone", function()
  local a, b = datasets.load "text_tasks", datasets.load("text_tasks", { length = 7 })
  check.equal(b:get(6), a:get(6))
  check.ok(datasets.load("text_tasks", { seed = 1 }):get(6).prompt ~= a:get(6).prompt)
  check.ok(datasets.load("text_tasks", { split = "test" }):get(6).prompt ~= a:get(6).prompt)
  check.equal({ #a, #datasets.load("text_tasks", { split = "development" }) }, { 20000, 500 })
  check.equal(a:get(6).task, tasks.tasks[2])
end)

check.test("a batch counts the answers alone", function()
  local tokenizer = zoo.tokenizer "kjv-draft"
  local set = datasets.load("text_tasks", { tokenizer = tokenizer })
  local batch = set:batch { 3, 11 }
  local tokens, targets, cu = batch.tokens:flatten():tolist(), batch.targets:flatten():tolist(),
    batch.cu_seqlens:tolist()
  check.equal({ #tokens, #cu, cu[1] }, { cu[3], 3, 0 })
  local counted, longest = 0, 0
  for k, i in ipairs { 3, 11 } do
    local item, asked, seen = set:get(i), {}, {}
    for at = cu[k] + 1, cu[k + 1] do
      seen[#seen + 1] = tokens[at]
      if targets[at] ~= -100 then asked[#asked + 1] = targets[at] end
      if targets[at] ~= -100 and at < cu[k + 1] then check.equal(targets[at], tokens[at + 1]) end
    end
    check.equal(tokenizer:decode(asked), item.answer)
    seen[#seen + 1] = asked[#asked]
    check.equal(tokenizer:decode(seen), item.prompt .. item.answer)
    counted, longest = counted + #asked, math.max(longest, cu[k + 1] - cu[k])
  end
  check.equal({ batch.count, batch.longest }, { counted, longest })
end)

check.test("a score is that of greedy generation and of the loss", function()
  local model, tokenizer = zoo.load "kjv-draft", zoo.tokenizer "kjv-draft"
  local set = datasets.load("text_tasks", { tasks = { "missing", "count" }, length = 8, tokenizer = tokenizer })
  -- A head that copies one token of each answer would be hard to make; a few steps of training give some right answers.
  local optimizer, batch = ty.optim.AdamW(model, { lr = 3e-3 }), set:batch { 0, 1, 2, 3 }
  for _ = 1, 12 do
    ty.scope(function()
      optimizer:step(model:loss(batch.tokens, batch.targets, { cu_seqlens = batch.cu_seqlens }))
    end)
  end
  local score = tasks.score(model, set, { batch = 3 })
  local hits, sum = 0, 0
  for i, item in set:each() do
    local prompt, asked = tokenizer:encode(item.prompt), tokenizer:encode(item.answer)
    local n = asked:numel()
    local out = model:generate(prompt:unsqueeze(0), n, { temperature = 0, stop_tokens = false }):flatten()
    local hit = out:narrow(0, out:numel() - n, n):eq(asked):all():item() and 1 or 0
    check.equal(score.hits[i + 1], hit, "hit " .. i)
    hits, sum = hits + hit, sum + score.losses[i + 1]
  end
  check.ok(hits > 0 and hits < 8, ("%d hits of 8 say nothing"):format(hits))
  check.close(score.exact, hits / 8, 1e-12)
  local all = set:batch { 0, 1, 2, 3, 4, 5, 6, 7 }
  local loss = ty.no_grad(function()
    return model:loss(all.tokens, all.targets, { cu_seqlens = all.cu_seqlens }):item()
  end)
  check.close(score.loss, loss, 1e-4, "loss")
  check.close(sum / all.count, loss, 1e-4, "losses")
  local some = tasks.score(model, set, { positions = { 5, 2 } })
  check.equal(some.hits, { score.hits[6], score.hits[3] })
  check.close(some.losses[2], score.losses[3], 1e-4)
  check.close((score.by_task.missing.exact + score.by_task.count.exact) / 2, score.exact, 1e-12)
end)

check.test("scores of a model for each task", function()
  local model, tokenizer = zoo.load "kjv-lm", zoo.tokenizer "kjv-lm"
  local names = { "count", "book", "copy" }
  local set = datasets.load("text_tasks", { length = 8, tasks = names, tokenizer = tokenizer, split = "test" })
  local one = tasks.score(model, set)
  local each = tasks.score_each({ count = model, book = model, copy = model }, set, { batch = 2 })
  check.close(each.losses, one.losses, 1e-3)
  check.equal({ each.hits, each.exact }, { one.hits, one.exact })
  check.fails(function() tasks.score_each({ count = model }, set) end, 'models["book"]: expected a module, got nil')
  check.fails(function() tasks.score_each(3, set) end, "score_each: models: expected a table, got 3")
end)

check.test("page, sheet, mistakes", function()
  check.equal(datasets.info("text_tasks").splits.test:match "%d,%d+ items", "1,000 items")
  local path = os.tmpname() .. ".png"
  check.equal(datasets.show("text_tasks", { path = path, count = 3 }), path)
  os.remove(path)
  local function load(options) return function() return datasets.load("text_tasks", options) end end
  check.fails(load { split = "validation" }, "there is no \"validation\"; there are: development, test, training")
  check.fails(load { tasks = { "cuont" } }, "there is no \"cuont\"; there are: book, copy, count")
  check.fails(load { tasks = {} }, "tasks: expected at least one, got none")
  check.fails(load { tokenizer = {} }, "tokenizer: expected one with encode()")
  local set = datasets.load("text_tasks", { length = 4 })
  check.fails(function() set:get(4) end, "TextTasks:get: i: expected 0 to 3, got 4")
  check.fails(function() set:batch { 0 } end, "with the option tokenizer")
  check.fails(function() tasks.score(nn.Linear(2, 2), {}) end, "set: expected one of datasets.load \"text_tasks\"")
  check.fails(function() tasks.score(nn.Linear(2, 2), set, { positions = {} }) end, "positions: expected at least one")
  check.fails(function() tasks.pack({}, {}) end, "tokenizer: expected one with encode()")
  check.fails(function() tasks.pack(zoo.tokenizer "kjv-draft", { { prompt = "a" } }) end,
    "answer of item 1: expected a string")
  check.fails(function() tasks.score({}, set) end, "model: expected a module")
end)

check.finish()
