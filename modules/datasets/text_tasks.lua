--- Small tasks of text over the King James Bible, in one form of prompt, for adapters of small language models. Item i
-- depends on (seed, split, i) alone. The page is datasets/text_tasks/README.md.
--
--     local set = datasets.load("text_tasks", { tokenizer = zoo.tokenizer "kjv-lm" })
--     print(set:get(0).prompt, set:get(0).answer)
--     llm.train.fit(model, set, { steps = 100 })            -- a loss over the answers alone
--     local test = datasets.load("text_tasks", { split = "test", tokenizer = zoo.tokenizer "kjv-lm" })
--     print(datasets.text_tasks.score(model, test).exact)
local ty = require "tycho"
local arguments = require "tycho.arguments"
local items = require "tycho.datasets.items"
local kjv = require "tycho.datasets.kjv"
local random = require "tycho.datasets.random"

local M = {}

--- Books that the task "book" asks for: each has chapters in every split.
M.books = { "Genesis", "Leviticus", "Job", "Psalm", "Proverbs", "Isaiah", "Matthew", "Acts" }

--- The splits, by name how many items they have unless `length` says otherwise.
M.sizes = { training = 20000, development = 500, test = 1000 }

-- Chapters of a split. kjv-lm never saw those of development and test, which take turns.
local function chapters_of(split)
  local all, list = kjv.load { split = split == "training" and "training" or "held_out" }, {}
  for i = 1, #all do list[i] = all:get(i - 1) end
  return split == "training" and list or ty.data.deal(list, 2)[split == "test" and 1 or 2]
end

-- Each split's chapters, read once: a list, and lists by book.
local known = {}
local function source(split)
  if not known[split] then
    local list, by_book = chapters_of(split), {}
    for _, chapter in ipairs(list) do
      by_book[chapter.book] = by_book[chapter.book] or {}
      table.insert(by_book[chapter.book], chapter)
    end
    known[split] = { list = list, by_book = by_book }
  end
  return known[split]
end

local function words_of(text)
  local words = {}
  for word in text:gmatch "%S+" do words[#words + 1] = word end
  return words
end

local function plain(word) return (word:gsub("[%p]+$", ""):gsub("^[%p]+", "")) end

-- Some words of a verse in a row: a list of `low` to `high` words, fewer where the verse has fewer.
local function stretch(draw, chapters, low, high)
  local words = words_of(draw:choose(draw:choose(chapters).verses))
  local count = math.min(draw:integer(low, high), #words)
  local from = draw:integer(0, #words - count)
  return table.move(words, from + 1, from + count, 1, {})
end

-- Such a stretch of words without punctuation.
local function bare_stretch(draw, chapters, low, high)
  local words = stretch(draw, chapters, low, high)
  for i, word in ipairs(words) do words[i] = plain(word) end
  return words
end

-- By name a function of the item's numbers and the split's chapters: the text after the task's name, and the answer.
local makers = {}

function makers.count(draw, from)
  local lines = {}
  for i = 1, draw:integer(1, 6) do lines[i] = table.concat(bare_stretch(draw, from.list, 2, 3), " ") end
  return table.concat(lines, "; "), tostring(#lines)
end

function makers.copy(draw, from)
  local words = bare_stretch(draw, from.list, 9, 12)
  local count = math.min(draw:integer(2, 4), #words)
  local first = draw:integer(1, #words - count + 1)
  local marked = table.concat(words, " ", first, first + count - 1)
  words[first] = "[" .. words[first]
  words[first + count - 1] = words[first + count - 1] .. "]"
  return table.concat(words, " "), marked
end

function makers.book(draw, from)
  local book = draw:choose(M.books)
  return table.concat(stretch(draw, from.by_book[book], 16, 20), " "), book
end

function makers.order(draw, from)
  local words = bare_stretch(draw, from.list, 4, 4)
  local right = table.concat(words, " ")
  return table.concat(draw:shuffle(words), " "), right
end

function makers.missing(draw, from)
  local words = bare_stretch(draw, from.list, 10, 14)
  local at = draw:integer((#words + 1) // 2, #words)
  local word = words[at]
  words[at] = "[ ]"
  return table.concat(words, " "), word
end

--- The names of the tasks, sorted.
M.tasks = {}
for name in pairs(makers) do M.tasks[#M.tasks + 1] = name end
table.sort(M.tasks)

--- Prompts with their answers, drawn on demand, as a data set.
---@class TextTasks
---@field size integer   items
---@field tasks string[] which take turns
local TextTasks = ty.data.class "TextTasks"

function TextTasks:describe()
  return ("%s (%s, seed %d)"):format(table.concat(self.tasks, ", "), self.split, self.seed)
end

--- Item i: task, prompt ("Copy: And God [said Let] there\nAnswer:") and answer (" said Let\n"), which follows it.
---@param i integer
---@return {task: string, prompt: string, answer: string}
function TextTasks:get(i)
  i = items.position("TextTasks:get", i, self.size)[1]
  local task = self.tasks[i % #self.tasks + 1]
  local text, answer
  local attempt = 0
  repeat -- short verses can leave nothing to ask for
    text, answer = makers[task](random.new(self.seed, self.split .. task .. attempt, i), source(self.split))
    attempt = attempt + 1
  until answer:find "%w"
  return { task = task, prompt = ("%s%s: %s\nAnswer:"):format(task:sub(1, 1):upper(), task:sub(2), text),
    answer = " " .. answer .. "\n" }
end

local function check_tokenizer(who, tokenizer)
  local kind = type(tokenizer)
  if (kind ~= "table" and kind ~= "userdata") or ty.is_tensor(tokenizer) or not tokenizer.encode then
    arguments.fail("%s: tokenizer: expected one with encode(), got %s", who, arguments.describe(tokenizer))
  end
end

local function ids(tokenizer, text)
  local tokens = tokenizer:encode(text)
  return ty.is_tensor(tokens) and tokens:tolist() or tokens
end

--- Prompts with answers packed for a language model: tokens and targets i64 [1, n] (-100: not counted, all but the
-- answers), cu_seqlens i64 [items + 1], longest, count (targets that count).
---@param tokenizer Tokenizer
---@param list {prompt: string, answer: string}[]
---@return {tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, longest: integer, count: integer}
function M.pack(tokenizer, list)
  local who = "datasets.text_tasks.pack"
  check_tokenizer(who, tokenizer)
  arguments.expect(who, "list", list, "a list of tables")
  if #list == 0 then arguments.fail("%s: list: expected at least one, got an empty list", who) end
  local tokens, targets, cu, longest, count = {}, {}, { 0 }, 0, 0
  for i, item in ipairs(list) do
    for _, key in ipairs { "prompt", "answer" } do
      arguments.expect(who, ("%s of item %d"):format(key, i), item[key], "a string")
    end
    local row, asked = ids(tokenizer, item.prompt), ids(tokenizer, item.answer)
    if #row == 0 or #asked == 0 then arguments.fail("%s: item %d: expected texts that are not empty", who, i) end
    local n = #row + #asked - 1
    for k = 1, #row - 1 do targets[#targets + 1] = -100 end
    for k, token in ipairs(asked) do
      targets[#targets + 1] = token
      if k < #asked then row[#row + 1] = token end
    end
    table.move(row, 1, n, #tokens + 1, tokens)
    cu[#cu + 1], longest, count = #tokens, math.max(longest, n), count + #asked
  end
  return { tokens = ty.tensor(tokens, { dtype = "i64" }):unsqueeze(0),
    targets = ty.tensor(targets, { dtype = "i64" }):unsqueeze(0), cu_seqlens = ty.tensor(cu, { dtype = "i64" }),
    longest = longest, count = count }
end

--- Items as pack() has them; needs the option `tokenizer`.
---@param positions integer[]|Tensor
---@return {tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, longest: integer, count: integer}
function TextTasks:batch(positions)
  if not self.tokenizer then
    arguments.fail("TextTasks:batch: expected a set with the option tokenizer, got one without")
  end
  local list = {}
  for k, i in ipairs(items.positions("TextTasks:batch", positions, self.size)) do list[k] = self:get(i) end
  if #list == 0 then arguments.fail("TextTasks:batch: positions: expected at least one, got an empty list") end
  return M.pack(self.tokenizer, list)
end

--- datasets.load("text_tasks", options). options: split ("training", "development", "test"), tasks (all of M.tasks: a
-- list, whose tasks take turns), length (items; by default those of M.sizes), seed (0), tokenizer (for batches).
---@param options? {split: string, tasks: string[], length: integer, seed: integer, tokenizer: Tokenizer}
---@return TextTasks
function M.load(options)
  local who = "datasets.text_tasks"
  local o = arguments.read(who, options, { split = "training", tasks = M.tasks, length = arguments.none, seed = 0,
    tokenizer = arguments.none }, { split = "a string", tasks = "a list of strings", length = "an integer >= 1",
    seed = "an integer" })
  if not M.sizes[o.split] then
    arguments.fail("%s: split: there is no \"%s\"; there are: development, test, training%s", who, o.split,
      ty.core.nearest(o.split, M.sizes))
  end
  if #o.tasks == 0 then arguments.fail("%s: tasks: expected at least one, got none", who) end
  for _, task in ipairs(o.tasks) do
    if not makers[task] then
      arguments.fail("%s: tasks: there is no \"%s\"; there are: %s%s", who, task, table.concat(M.tasks, ", "),
        ty.core.nearest(task, makers))
    end
  end
  if o.tokenizer ~= nil then check_tokenizer(who, o.tokenizer) end
  return setmetatable({ split = o.split, tasks = table.move(o.tasks, 1, #o.tasks, 1, {}), seed = o.seed,
    size = o.length or M.sizes[o.split], tokenizer = o.tokenizer }, TextTasks)
end

--- How well a language model answers: an answer is exact where each of its tokens is the likeliest one after those
-- before it, which is to say that greedy generation gives it. options: batch (items at a time, 64), device, positions
-- (a list of the items that count, all by default). Returns exact (share of the items), loss (nats per token of the
-- answers), by_task (by name the same two), hits (for each item 1 or 0) and losses (for each item the sum over its
-- answer, in nats).
---@param model LanguageModel
---@param set TextTasks with a tokenizer
---@param options? {batch?: integer, device?: string, positions?: integer[]}
---@return {exact: number, loss: number, by_task: table, hits: integer[], losses: number[]}
function M.score(model, set, options)
  local who = "datasets.text_tasks.score"
  arguments.expect(who, "model", model, "a module")
  if getmetatable(set) ~= TextTasks then
    arguments.fail("%s: set: expected one of datasets.load \"text_tasks\", got %s", who, arguments.describe(set))
  end
  local o = arguments.read(who, options, { batch = 64, device = arguments.none, positions = arguments.none },
    { batch = "an integer >= 1", device = "a string", positions = "a list of integers" })
  local wanted = o.positions
  if not wanted then
    wanted = {}
    for i = 1, #set do wanted[i] = i - 1 end
  end
  if #wanted == 0 then arguments.fail("%s: positions: expected at least one, got none", who) end
  local was_training, hits, losses, sums = model.training, {}, {}, {}
  model:eval()
  local function add(name, hit, loss, count)
    local sum = sums[name] or { items = 0, exact = 0, loss = 0, tokens = 0 }
    sums[name] = sum
    sum.items, sum.exact, sum.loss = sum.items + 1, sum.exact + hit, sum.loss + loss
    sum.tokens = sum.tokens + count
  end
  for from = 1, #wanted, o.batch do
    local positions = table.move(wanted, from, math.min(from + o.batch - 1, #wanted), 1, {})
    local right, nats, targets, cu = ty.scope(function()
      return ty.no_grad(function()
        local batch = set:batch(positions)
        local tokens, target = batch.tokens, batch.targets:flatten()
        if o.device then tokens, target = tokens:to { device = o.device }, target:to { device = o.device } end
        local logits = model(tokens, { cu_seqlens = batch.cu_seqlens:to { device = tokens.device },
          longest = batch.longest }):flatten(0, 1)
        return logits:argmax(-1):eq(target):to("i64"):tolist(),
          ty.nn.cross_entropy(logits, target, { reduction = "none" }):tolist(), target:tolist(),
          batch.cu_seqlens:tolist()
      end)
    end)
    for k, position in ipairs(positions) do
      local hit, loss, count = 1, 0, 0
      for at = cu[k] + 1, cu[k + 1] do
        if targets[at] ~= -100 then hit, loss, count = hit * right[at], loss + nats[at], count + 1 end
      end
      hits[from + k - 1], losses[from + k - 1] = hit, loss
      local task = set.tasks[position % #set.tasks + 1]
      for _, name in ipairs { "", task } do add(name, hit, loss, count) end
    end
  end
  model:train(was_training)
  local by_task = {}
  for name, sum in pairs(sums) do by_task[name] = { exact = sum.exact / sum.items, loss = sum.loss / sum.tokens } end
  local whole = by_task[""]
  by_task[""] = nil
  return { exact = whole.exact, loss = whole.loss, by_task = by_task, hits = hits, losses = losses }
end

--- How well models answer that have a task each, with a switch that knows the task of every item: as score() says it,
-- without by_task. options: batch and device, as in score().
---@param models table<string, LanguageModel>  by the task
---@param set TextTasks with a tokenizer
---@param options? {batch?: integer, device?: string}
---@return {exact: number, hits: integer[], losses: number[]}
function M.score_each(models, set, options)
  local who = "datasets.text_tasks.score_each"
  arguments.expect(who, "models", models, "a table")
  if getmetatable(set) ~= TextTasks then
    arguments.fail("%s: set: expected one of datasets.load \"text_tasks\", got %s", who, arguments.describe(set))
  end
  local o = arguments.read(who, options, { batch = 64, device = arguments.none },
    { batch = "an integer >= 1", device = "a string" })
  local found = { hits = {}, losses = {}, exact = 0 }
  for k, task in ipairs(set.tasks) do
    local positions = {}
    for i = k - 1, #set - 1, #set.tasks do positions[#positions + 1] = i end
    if #positions > 0 then
      local model = arguments.expect(who, ("models[%q]"):format(task), models[task], "a module")
      local one = M.score(model, set, { batch = o.batch, device = o.device, positions = positions })
      for i, position in ipairs(positions) do
        found.hits[position + 1], found.losses[position + 1] = one.hits[i], one.losses[i]
        found.exact = found.exact + one.hits[i]
      end
    end
  end
  found.exact = found.exact / #set
  return found
end

--- What datasets.show draws: some items, a line for each.
---@param options {path: string, split?: string, count: integer, seed: integer}
---@return string path
function M.show(options)
  local o = arguments.read("datasets.show", options, { path = "text_tasks.png", split = "training", count = 20,
    seed = 0, columns = arguments.none }, { path = "a string", split = "a string", count = "an integer >= 1",
    seed = "an integer", columns = "an integer >= 1" })
  local set, lines = M.load { split = o.split, seed = o.seed }, {}
  for k = 1, math.min(o.count, #set) do
    local item = set:get(k - 1)
    lines[k] = item.prompt:gsub("\n", "  ") .. item.answer:gsub("\n", "")
    if #lines[k] > 132 then lines[k] = lines[k]:sub(1, 60) .. " .. " .. lines[k]:sub(-66) end
  end
  ty.plot.grid(ty.full({ #lines, 1, 2, 800 }, 60, { dtype = "u8" }), { columns = 1, labels = lines }):save(o.path)
  return o.path
end

return M
