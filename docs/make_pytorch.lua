-- Writes docs/pytorch.md: what PyTorch's public functions and classes are called here, and why some are not there.
--
--   tycho docs/make_pytorch.lua [--check]
--
-- Their names are those of tests/fixtures/torch_names.json, which tests/fixtures/make_torch_names.py makes. --check
-- writes nothing and fails when the page is out of date; tests/lua/torch_names_test.lua does the same.
local ty = require "tycho"

local here = (arg and arg[0] or "docs/"):match "^(.*/)" or "./"

-- By module: PyTorch's name = ours, where it is another one.
local renamed = {
  torch = {
    adaptive_max_pool1d = "adaptive_max_pool1d", affine_grid_generator = "affine_grid", angle = "complex_angle",
    bilinear = "nn.Bilinear", binary_cross_entropy_with_logits = "bce_with_logits", chain_matmul = "multi_dot",
    clamp_max = "clamp", clamp_min = "clamp", complex = "complex", conj = "complex_conj",
    conj_physical = "complex_conj", cosine_embedding_loss = "nn.cosine_embedding_loss", det = "det",
    igamma = "gammainc", igammac = "gammaincc", initial_seed = "manual_seed", inverse = "inverse",
    is_grad_enabled = "is_grad_enabled", logdet = "slogdet", mvlgamma = "lgamma", pinverse = "pinv",
    resize = "reshape", scalar_tensor = "tensor", seed = "manual_seed", split_with_sizes = "split",
    unfold = "unfold", range = "arange", arange = "arange", set_num_threads = "threads", nuclear_norm = "matrix_norm",
    frobenius_norm = "norm", compile = "compile", rms_norm = "rms_norm", lu = "lu", qr = "qr", svd = "svd",
    symeig = "eigh", triangular_solve = "solve_triangular", cholesky_inverse = "cholesky_solve",
    view_as_complex = "complex", view_as_real = "complex", real = "complex", imag = "complex",
    is_complex = "complex", index_reduce = "scatter_reduce", lu_solve = "solve",
    matmul = "matmul", put = "index_put", save = "save", load = "load", from_numpy = "io.load_npy", rand = "rand",
    empty_strided = "empty", empty_permuted = "empty", is_same_size = "equal",
  },
  ["torch.linalg"] = {
    inv = "inverse", cholesky_ex = "cholesky", inv_ex = "inverse", solve_ex = "solve", lu_factor = "lu",
    lu_factor_ex = "lu", lu_solve = "solve", vector_norm = "norm", multi_dot = "multi_dot", polar = "svd",
    vecdot = "vecdot", tensorsolve = "solve", tensorinv = "inverse", eigvals = "eig", svdvals = "svdvals",
  },
  ["torch.special"] = {
    expit = "expit", gammaln = "lgamma", psi = "digamma", multigammaln = "lgamma", modified_bessel_i0 = "i0",
    modified_bessel_i1 = "i1", modified_bessel_k0 = "log_bessel_k", modified_bessel_k1 = "log_bessel_k",
    scaled_modified_bessel_k0 = "log_bessel_k", scaled_modified_bessel_k1 = "log_bessel_k", xlog1py = "xlog1py",
  },
  ["torch.nn.functional"] = {
    binary_cross_entropy_with_logits = "bce_with_logits", bilinear = "nn.Bilinear", upsample = "interpolate",
    upsample_bilinear = "interpolate", upsample_nearest = "interpolate", dropout1d = "nn.Dropout1d",
    dropout2d = "nn.Dropout2d", dropout3d = "nn.Dropout3d", alpha_dropout = "nn.AlphaDropout",
    feature_alpha_dropout = "nn.AlphaDropout", embedding_bag = "nn.EmbeddingBag", instance_norm = "nn.InstanceNorm2d",
    local_response_norm = "nn.LocalResponseNorm", multi_head_attention_forward = "nn.MultiheadAttention",
    triplet_margin_with_distance_loss = "nn.triplet_margin_loss",
    max_pool1d_with_indices = "max_pool1d", max_pool2d_with_indices = "max_pool2d",
    max_pool3d_with_indices = "max_pool3d", adaptive_max_pool1d_with_indices = "adaptive_max_pool1d",
    adaptive_max_pool2d_with_indices = "adaptive_max_pool2d",
    adaptive_max_pool3d_with_indices = "adaptive_max_pool3d",
  },
  ["torch.nn"] = {
    NLLLoss2d = "nn.NLLLoss", Softmax2d = "nn.Softmax", UpsamplingBilinear2d = "nn.Upsample",
    UpsamplingNearest2d = "nn.Upsample", CrossMapLRN2d = "nn.LocalResponseNorm", Container = "nn.Module",
    TripletMarginWithDistanceLoss = "nn.TripletMarginLoss", LinearCrossEntropyLoss = "linear_cross_entropy",
    RNNBase = "nn.RNN", RNNCellBase = "nn.RNNCell", ParameterDict = "nn.ModuleDict",
    ZeroPad2d = "nn.ZeroPad2d",
  },
  ["torch.optim"] = {},
  ["torch.optim.lr_scheduler"] = {
    ConstantLR = "optim.Scheduler", CosineAnnealingLR = "optim.cosine",
    CosineAnnealingWarmRestarts = "optim.cosine_restarts", CyclicLR = "optim.cyclic",
    ExponentialLR = "optim.exponential",
    LambdaLR = "optim.Scheduler", LinearLR = "optim.linear", MultiStepLR = "optim.step",
    MultiplicativeLR = "optim.chained", OneCycleLR = "optim.one_cycle", PolynomialLR = "optim.polynomial",
    SequentialLR = "optim.sequential", StepLR = "optim.step", ReduceLROnPlateau = "optim.ReduceLROnPlateau",
  },
  ["torch.fft"] = {},
  ["torch.sparse"] = {
    sampled_addmm = "sparse.sddmm", sparse_coo_tensor = "sparse.coo", sparse_csr_tensor = "sparse.csr",
  },
}

-- Why others are left out: a pattern of names of any module, or of one, and the reason.
local left_out = {
  { "^as_strided", "views by raw strides: slices, permute, unfold and expand cover their uses" },
  { "^fractional", "rarely used; pooling with computed sizes is adaptive pooling" },
  { "^Fractional", "rarely used; pooling with computed sizes is adaptive pooling" },
  { "polynomial", "orthogonal polynomials: a loop of two products" },
  { "^bessel", "of the Bessel functions the modified ones, which models of directions need" },
  { "^spherical_bessel", "of the Bessel functions the modified ones" }, { "^airy", "rarely used" },
  { "^hfft", "spectra of Hermitian signals: rfft of the conjugate" },
  { "^ihfft", "spectra of Hermitian signals: irfft of the conjugate" },
  { "^ldl", "Cholesky and LU serve" }, { "^lobpcg", "iterative solvers are programs, not ops" },
  { "^geqrf", "raw LAPACK results: qr gives the matrices" }, { "^orgqr", "raw LAPACK results: qr gives the matrices" },
  { "^ormqr", "raw LAPACK results: qr gives the matrices" },
  { "^householder_product", "raw LAPACK results: qr gives the matrices" },
  { "^lu_unpack", "lu gives the matrices" }, { "_lowrank$", "svd of a projection; peft.galore has the projection" },
  { "^scaled_", "products in 8-bit floats" }, { "grouped_mm$", "products of groups: batches serve" },
  { "^SyncBatchNorm", "distributed" }, { "^AdaptiveLogSoftmax", "linear_cross_entropy serves large vocabularies" },
  { "^SparseAdam", "gradients are dense" }, { "^Optional", "a type, no function" },
  { "^histogramdd", "rarely used" }, { "^nextafter", "bits of floats: x:view(\"i32\") has them" },
  { "^frexp", "bits of floats: x:view(\"i32\") has them" }, { "^isreal", "complex numbers are pairs" },
  { "^matrix_sqrth", "of symmetric matrices eigh gives it" }, { "^SyncBatchNorm", "distributed" },
  { "^spsolve", "systems with sparse matrices: direct solvers are libraries of their own" },
  { "^spdiags", "sparse.coo of the diagonals' positions" }, { "^addmm$", "of sparse matrices: a:mm(x) + y" },
  { "^log_softmax$", "of sparse matrices: the logarithm of softmax's values" },
  { "^vmap", "not there yet" }, { "^poisson$", "seeded_noise{kind = \"poisson\"} draws it" },
}

local order = { "torch", "torch.linalg", "torch.fft", "torch.special", "torch.nn.functional", "torch.nn", "torch.optim",
  "torch.optim.lr_scheduler", "torch.sparse" }

local Sparse = getmetatable(ty.sparse.from_dense(ty.ones(1, 1)))

-- Whether a name such as "nn.Bilinear" or "fft" is one of ours, and how it is written.
local function found(module, name)
  local part, rest = name:match "^(%a[%w_]*)%.(.+)$"
  local function has(table_name, t, key)
    local ok, value = pcall(function() return t[key] end)
    return ok and value ~= nil and table_name .. "." .. key or nil
  end
  if part then return has("ty." .. part, ty[part], rest) end
  if module == "torch.sparse" then return has("Sparse", Sparse, name) end
  if module == "torch.nn" then return has("nn", ty.nn, name) or has("ty", ty, name) end
  if module:find "optim" then return has("optim", ty.optim, name) end
  return has("ty", ty, name) or has("nn", ty.nn, name)
    or (ty.core.Tensor.methods[name] and "x:" .. name) or nil
end

local function reason(name)
  for _, row in ipairs(left_out) do
    if name:find(row[1]) then return row[2] end
  end
  return nil
end

local function page(folder)
  local all = ty.io.load_json((folder or here) .. "../tests/fixtures/torch_names.json")
  local lines, total, there, unknown = {}, 0, 0, {}
  for _, module in ipairs(order) do
    local present, missing = {}, {}
    for _, name in ipairs(all.names[module]) do
      total = total + 1
      local ours = found(module, name) or (renamed[module][name] and found(module, renamed[module][name]))
      if ours then
        there = there + 1
        local own = ours:match "[^.:]+$"
        present[#present + 1] = own == name and ("`%s`"):format(name) or ("`%s` (`%s`)"):format(name, ours)
      else
        local why = reason(name)
        if not why then unknown[#unknown + 1] = module .. "." .. name end
        missing[#missing + 1] = ("| `%s` | %s |"):format(name, why or "not there yet")
      end
    end
    lines[#lines + 1] = ("\n## %s\n\n%d of %d are there. %s\n"):format(module, #present, #present + #missing,
      table.concat(present, ", "))
    if #missing > 0 then
      lines[#lines + 1] = "| left out | why |\n|---|---|\n" .. table.concat(missing, "\n") .. "\n"
    end
  end
  local head = ([[# Coming from PyTorch

Made by docs/make_pytorch.lua. The public functions and classes of PyTorch %s, without what is quantized,
distributed, deprecated or of a backend, and what they are called here where that is another name. Dimensions count from
0 as there; options come as a table, `ty.fft(x, { dim = -2 })`; complex numbers are pairs, the last dimension.

%d of %d (%.0f %%) are there.
]]):format(all.version, there, total, 100 * there / total)
  return head .. table.concat(lines), there / total, unknown
end

if arg and arg[0] and arg[0]:find "make_pytorch%.lua$" then
  local text, share, unknown = page()
  local path = here .. "pytorch.md"
  if arg[1] == "--check" then
    local same = ty.io.exists(path) and ty.io.read(path) == text
    if not same then print(path .. " is out of date: tycho docs/make_pytorch.lua") end
    os.exit(same)
  end
  ty.io.write_atomic(path, text)
  print(("wrote %s: %.1f %% are there"):format(path, 100 * share))
  if #unknown > 0 then print("without a reason: " .. table.concat(unknown, " ")) end
end

return page
